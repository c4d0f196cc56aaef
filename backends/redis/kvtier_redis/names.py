"""What things are called in the server."""

from __future__ import annotations

from kvtier_sdk import Namespace, OffloadKey

_GLOB_SPECIAL = b"\\*?["


class Names:
    """The keys of one namespace below one prefix.

    ``<prefix>{}<fingerprint>:<key>`` is a chunk, ``<prefix>{}<fingerprint>.manifest`` says what
    the namespace stands for. A cluster hashes what stands between a key's first pair of braces,
    and all of the key where that is empty: whatever bytes a chunk's key has, all of it decides.

    Args:
        prefix: what each begins with; holds no brace.
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
        """The chunk that one of the server's keys stands for."""
        return name.removeprefix(self._start)

    @property
    def pattern(self) -> bytes:
        """The glob pattern that all chunks of the namespace match, and nothing else does."""
        escaped = b"".join(
            b"\\" + bytes([byte]) if byte in _GLOB_SPECIAL else bytes([byte])
            for byte in self._start
        )
        return escaped + b"*"
