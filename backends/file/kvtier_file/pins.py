"""Pins on the chunks that this process is moving, so that it does not evict them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvtier_file.chunks import ChunkId


class Pins:
    """Counts the users of each chunk. Callable from any thread; never waits for another process.

    Other processes do not see the pins and need not: a file unlinked during a read stays
    readable, and a file unlinked before it is a miss.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[ChunkId] = Counter()

    @contextmanager
    def held(self, chunk_ids: Collection[ChunkId]) -> Iterator[None]:
        """Pin chunks while the block runs."""
        with self._lock:
            self._counts.update(chunk_ids)
        try:
            yield
        finally:
            with self._lock:
                self._counts.subtract(chunk_ids)
                for chunk_id in chunk_ids:
                    if not self._counts[chunk_id]:
                        del self._counts[chunk_id]

    def pinned(self) -> frozenset[ChunkId]:
        """Return the pinned chunks."""
        with self._lock:
            return frozenset(self._counts)
