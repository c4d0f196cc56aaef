"""Chunks that this process is moving, and therefore does not evict."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvtier_file.budget import Chunk


class Pins:
    """Counts who is at a chunk. Callable from any thread; never waits for another process.

    Other processes do not see the pins and need not: a file that is unlinked while it is read
    stays readable, and one that is unlinked before that is a miss.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Chunk] = Counter()

    @contextmanager
    def held(self, chunks: Collection[Chunk]) -> Iterator[None]:
        """Pin chunks for as long as the block lasts."""
        with self._lock:
            self._counts.update(chunks)
        try:
            yield
        finally:
            with self._lock:
                self._counts.subtract(chunks)
                for chunk in chunks:
                    if not self._counts[chunk]:
                        del self._counts[chunk]

    def chunks(self) -> frozenset[Chunk]:
        """What is pinned now."""
        with self._lock:
            return frozenset(self._counts)
