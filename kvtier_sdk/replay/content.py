"""What is in a chunk: a function of its key, so that whatever comes back can be compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtier_sdk.types import OffloadKey

_BASE_SEED = 2026


class ChunkContent:
    """Makes chunks and compares them.

    A chunk is a fixed random sequence of 64-bit words, each plus a digest of the key: made at
    the speed of memory, and different from another key's, or from itself moved by some bytes, in
    nearly every word.

    Args:
        chunk_bytes: length of a chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        words = -(-chunk_bytes // 8)
        rng = np.random.default_rng(_BASE_SEED)
        self._base = rng.integers(0, 2**64, size=words, dtype=np.uint64)
        self._scratch = np.empty(words, np.uint64)
        self._bytes = self._scratch.view(np.uint8)[:chunk_bytes]

    def write(self, key: OffloadKey, view: memoryview) -> None:
        """Write a chunk's content, as the device would.

        Args:
            key: the chunk.
            view: its slot, ``chunk_bytes`` long.
        """
        np.frombuffer(view, np.uint8)[:] = self._expected(key)

    def wrong_bytes(self, key: OffloadKey, view: memoryview) -> int:
        """Compare a slot with what should be in it.

        Args:
            key: the chunk.
            view: its slot, ``chunk_bytes`` long.

        Returns:
            How many bytes differ.
        """
        return int(np.count_nonzero(np.frombuffer(view, np.uint8) != self._expected(key)))

    def _expected(self, key: OffloadKey) -> npt.NDArray[np.uint8]:
        np.add(self._base, np.uint64(xxh3_64_intdigest(key)), out=self._scratch)
        return self._bytes
