"""Names of chunks and manifests in Redis. A "name" is a key of Redis; a "key" is a chunk's key."""

from __future__ import annotations

import re

from kvtier_sdk import Namespace, OffloadKey, StoredNamespace

_MANIFEST = b".manifest"
_YOUNG = b".young:"


class Names:
    """The names of one namespace, with one prefix.

    ``<prefix>{}<fingerprint>:<key>`` is a chunk, and ``<prefix>{}<fingerprint>.manifest`` describes
    the namespace. ``<prefix>{}<fingerprint>.young:<key>`` marks a chunk that has a maximum age:
    while the mark exists, a use extends the chunk's expiry. The empty pair of braces makes a
    cluster hash the whole name, even if a chunk's key contains braces.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        self._root = f"{prefix}{{}}".encode()
        start = self._root + namespace.fingerprint.encode()
        self._start = start + b":"
        self._young = start + _YOUNG
        self.manifest = start + _MANIFEST

    def of(self, key: OffloadKey) -> bytes:
        return self._start + key

    def young(self, key: OffloadKey) -> bytes:
        return self._young + key

    def key_in(self, name: bytes) -> OffloadKey:
        return name.removeprefix(self._start)

    @property
    def pattern(self) -> bytes:
        """A glob pattern that matches only the namespace's chunks."""
        return _all_below(self._start)

    @property
    def root_pattern(self) -> bytes:
        """A glob pattern that matches all names in all namespaces with this prefix."""
        return _all_below(self._root)

    def fingerprint_in(self, name: bytes) -> str | None:
        """Return the fingerprint in a chunk's or a manifest's name; ``None`` for other names."""
        start, mark = len(self._root), len(self._start)
        fingerprint = name[start : mark - 1].decode(errors="replace")
        is_ours = name[mark - 1 : mark] == b":" or name[mark - 1 :] == _MANIFEST
        return fingerprint if is_ours and StoredNamespace.is_fingerprint(fingerprint) else None

    def manifest_of(self, fingerprint: str) -> bytes:
        return self._root + fingerprint.encode() + _MANIFEST


def _all_below(start: bytes) -> bytes:
    return re.sub(rb"[\\*?\[]", rb"\\\g<0>", start) + b"*"
