"""Zeroed buffers with guard bytes at both ends, which reveal a write outside the buffers."""

from __future__ import annotations

_GUARD = b"g" * 1000


class GuardedBuffers:
    def __init__(self, *lengths_bytes: int) -> None:
        self._memory = bytearray(_GUARD + bytes(sum(lengths_bytes)) + _GUARD)
        view = memoryview(self._memory)[len(_GUARD) :]
        self.buffers: list[memoryview] = []
        for length_bytes in lengths_bytes:
            self.buffers.append(view[:length_bytes])
            view = view[length_bytes:]

    @property
    def content(self) -> bytes:
        return bytes(self._memory[len(_GUARD) : -len(_GUARD)])

    def is_guarded(self) -> bool:
        return self._memory[: len(_GUARD)] == self._memory[-len(_GUARD) :] == _GUARD
