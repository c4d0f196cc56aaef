"""Memory for the headers of chunks under way."""

from __future__ import annotations

import mmap


class HeaderPool:
    """Header buffers, lent and taken back. It grows to the most that were ever lent at once.

    Args:
        header_bytes: length of each; a multiple of the tier's alignment, so that buffers that
            follow each other in a page-aligned mapping are aligned too.
    """

    _PER_MAPPING = 64

    def __init__(self, header_bytes: int) -> None:
        self._header_bytes = header_bytes
        self._free: list[memoryview] = []

    def take(self, count: int) -> list[memoryview]:
        """Lend ``count`` buffers, with old content."""
        while len(self._free) < count:
            memory = memoryview(mmap.mmap(-1, self._PER_MAPPING * self._header_bytes))
            self._free += [
                memory[start : start + self._header_bytes]
                for start in range(0, len(memory), self._header_bytes)
            ]
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give_back(self, headers: list[memoryview]) -> None:
        """Take buffers back; nothing may touch them now."""
        self._free += headers
