"""Names of chunks in the server."""

from __future__ import annotations

from kvtier_sdk import Namespace, OffloadKey, StoredNamespace

_GLOB_SPECIAL = b"\\*?["
_MANIFEST = b".manifest"
_YOUNG = b".young:"


class Names:
    """The keys of one namespace below one prefix.

    ``<prefix>{}<fingerprint>:<key>`` is a chunk, ``<prefix>{}<fingerprint>.manifest`` says what
    the namespace stands for, and ``<prefix>{}<fingerprint>.young:<key>`` is there for as long as a
    use extends the life of a chunk that has a maximum age. A cluster hashes the text between a
    key's first pair of braces, and the whole key if that is empty: so the whole of a chunk's key
    decides, whatever its bytes are.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        self._root = f"{prefix}{{}}".encode()
        start = self._root + namespace.fingerprint.encode()
        self._start = start + b":"
        self._young = start + _YOUNG
        self.manifest = start + _MANIFEST

    def of(self, key: OffloadKey) -> bytes:
        """The server's key of a chunk."""
        return self._start + key

    def young(self, key: OffloadKey) -> bytes:
        """The server's key that says that a use extends a chunk's life."""
        return self._young + key

    def key_in(self, name: bytes) -> OffloadKey:
        """The chunk of one of the server's keys."""
        return name.removeprefix(self._start)

    @property
    def pattern(self) -> bytes:
        """The glob pattern that matches the chunks of the namespace and nothing else."""
        return _all_below(self._start)

    @property
    def root_pattern(self) -> bytes:
        """The glob pattern that matches the chunks and manifests of all namespaces."""
        return _all_below(self._root)

    def fingerprint_in(self, name: bytes) -> str | None:
        """The fingerprint of the namespace that one of the server's keys belongs to, if any."""
        start, mark = len(self._root), len(self._start)
        fingerprint = name[start : mark - 1].decode(errors="replace")
        is_ours = name[mark - 1 : mark] == b":" or name[mark - 1 :] == _MANIFEST
        return fingerprint if is_ours and StoredNamespace.is_fingerprint(fingerprint) else None

    def manifest_of(self, fingerprint: str) -> bytes:
        """The server's key of a namespace's manifest."""
        return self._root + fingerprint.encode() + _MANIFEST


def _all_below(start: bytes) -> bytes:
    escaped = b"".join(
        b"\\" + bytes([byte]) if byte in _GLOB_SPECIAL else bytes([byte]) for byte in start
    )
    return escaped + b"*"
