"""Chunks that this process knows to be in a tier."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvtier_sdk.types import OffloadKey

#: The most chunks that are remembered, of 8 bytes each: 1 MiB a tier.
_PLACES = 2**17


class KnownChunks:
    """Remembers hashes of keys, each in the one place that it determines; the newest stays.

    Two keys of one hash are taken for one chunk: then, as with a chunk that has left the tier in
    silence, a load finds nothing.
    """

    def __init__(self) -> None:
        self._hashes: array[int] | None = None

    def __contains__(self, key: OffloadKey) -> bool:
        if self._hashes is None:
            return False
        hashed = hash(key)
        return self._hashes[hashed % _PLACES] == hashed

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Remember chunks."""
        if self._hashes is None:
            self._hashes = array("q", bytes(8 * _PLACES))
        for key in keys:
            hashed = hash(key)
            self._hashes[hashed % _PLACES] = hashed

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks, those that are known."""
        if self._hashes is not None:
            for key in keys:
                hashed = hash(key)
                if self._hashes[hashed % _PLACES] == hashed:
                    self._hashes[hashed % _PLACES] = 0

    def clear(self) -> None:
        """Forget all chunks."""
        self._hashes = None
