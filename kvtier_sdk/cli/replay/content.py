"""The content of a chunk, a function of its key, so that every loaded chunk can be compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtier_sdk.types import OffloadKey

_BASE_SEED = 2026


class ChunkContent:
    """Writes and checks chunks.

    A chunk is a fixed random sequence of 64-bit words, with a digest of the key added to each.
    It is made at the speed of memory. It differs in nearly every word from another key's chunk,
    and from itself shifted by some bytes.
    """

    def __init__(self, chunk_bytes: int) -> None:
        words = -(-chunk_bytes // 8)
        rng = np.random.default_rng(_BASE_SEED)
        self._base = rng.integers(0, 2**64, size=words, dtype=np.uint64)
        self._scratch = np.empty(words, np.uint64)
        self._bytes = self._scratch.view(np.uint8)[:chunk_bytes]

    def write(self, key: OffloadKey, view: memoryview) -> None:
        """Write a chunk's content into its slot, as the device would."""
        np.frombuffer(view, np.uint8)[:] = self._expected(key)

    def wrong_bytes(self, key: OffloadKey, view: memoryview) -> int:
        """Count the bytes of a slot that differ from its chunk's content."""
        return int(np.count_nonzero(np.frombuffer(view, np.uint8) != self._expected(key)))

    def _expected(self, key: OffloadKey) -> npt.NDArray[np.uint8]:
        np.add(self._base, np.uint64(xxh3_64_intdigest(key)), out=self._scratch)
        return self._bytes
