"""Memory outside the host pool: buffers for headers, sealed payloads and probes."""

from __future__ import annotations

import mmap

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.types import Region


class BufferArena:
    """Buffers of equal length in one mapping, which a tier can register for RDMA."""

    def __init__(self, buffer_bytes: int, count: int) -> None:
        self._buffer_bytes = buffer_bytes
        try:
            self._memory = memoryview(mmap.mmap(-1, buffer_bytes * count))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{count} buffers of {buffer_bytes} bytes for chunks under way cannot be mapped "
                f"({error}): lower option 'concurrency' or 'max_batch'"
            ) from error
        self._free: list[memoryview] = []
        self._uncut = 0

    @property
    def region(self) -> Region:
        return Region.of(self._memory)

    def take(self, count: int) -> list[memoryview]:
        """Lend ``count`` buffers, at least one. Their content is undefined."""
        while len(self._free) < count:
            end = self._uncut + self._buffer_bytes
            if end > len(self._memory):
                raise MemoryError(f"{count} buffers are needed, and {len(self._free)} are left")
            self._free.append(self._memory[self._uncut : end])
            self._uncut = end
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give_back(self, buffers: list[memoryview]) -> None:
        self._free += buffers
