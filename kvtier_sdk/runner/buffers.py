"""Memory for chunks under way that is not a slot's: headers, and sealed payloads."""

from __future__ import annotations

import mmap


class BufferPool:
    """Buffers of one length, lent and taken back. It grows to the most that were lent at once.

    Args:
        buffer_bytes: length of each; a multiple of the tier's alignment, so that buffers that
            follow each other in a page-aligned mapping are aligned too.
        per_mapping: number of buffers that are mapped at once.
    """

    def __init__(self, buffer_bytes: int, per_mapping: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._per_mapping = per_mapping
        self._free: list[memoryview] = []

    def take(self, count: int) -> list[memoryview]:
        """Lend ``count`` buffers, at least one, with old content."""
        while len(self._free) < count:
            memory = memoryview(mmap.mmap(-1, self._per_mapping * self._buffer_bytes))
            self._free += [
                memory[start : start + self._buffer_bytes]
                for start in range(0, len(memory), self._buffer_bytes)
            ]
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give_back(self, buffers: list[memoryview]) -> None:
        """Take buffers back; nothing may touch them now."""
        self._free += buffers
