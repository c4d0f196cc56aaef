"""Names of chunks in the server."""

from __future__ import annotations

from kvtier_sdk import Namespace, OffloadKey

_GLOB_SPECIAL = b"\\*?["


class Names:
    """The keys of one namespace below one prefix.

    ``<prefix>{}<fingerprint>:<key>`` is a chunk, ``<prefix>{}<fingerprint>.manifest`` says what
    the namespace stands for. A cluster hashes the text between a key's first pair of braces, and
    the whole key if that is empty: so the whole of a chunk's key decides, whatever its bytes are.

    Args:
        prefix: the beginning of each name; holds no brace.
        namespace: the namespace.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        start = f"{prefix}{{}}{namespace.fingerprint}".encode()
        self._start = start + b":"
        self.manifest = start + b".manifest"

    def of(self, key: OffloadKey) -> bytes:
        """The server's key of a chunk."""
        return self._start + key

    def key_in(self, name: bytes) -> OffloadKey:
        """The chunk of one of the server's keys."""
        return name.removeprefix(self._start)

    @property
    def pattern(self) -> bytes:
        """The glob pattern that matches the chunks of the namespace and nothing else."""
        escaped = b"".join(
            b"\\" + bytes([byte]) if byte in _GLOB_SPECIAL else bytes([byte])
            for byte in self._start
        )
        return escaped + b"*"
