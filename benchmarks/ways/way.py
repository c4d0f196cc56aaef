"""The work of a measurement, the ways to do it, and its figures."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvtier_sdk import HostPool, Region, SystemClock
from kvtier_sdk.aio.blocking import close_blocking_threads
from kvtier_sdk.pool import PoolLayout

OPERATIONS = ("store", "load")
# The most payload of one call of a tier.
_BATCH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Work:
    """The chunks of one measurement, which each way moves once in each direction.

    Attributes:
        chunk_bytes: length of a payload.
        header_bytes: length of the header before it.
        chunks: number of chunks to move.
        keys: number of different chunks among them.
        at_a_time: connections of a client, or threads, and calls of a tier.
        slots: headers and payloads in slots of a host pool, as many as a tier has under way. All
            ways move them in turns: what stays in the processor's cache is sent in less time.
        pool: the host pool.
        regions: the memory of all headers and of the pool.
        values: the same, for clients that take their own objects.
    """

    chunk_bytes: int
    header_bytes: int
    chunks: int
    keys: int
    at_a_time: int
    slots: list[list[memoryview]] = field(init=False, default_factory=list)
    pool: HostPool = field(init=False)
    regions: list[Region] = field(init=False, default_factory=list)
    values: list[bytes] = field(init=False, default_factory=list)

    @property
    def object_bytes(self) -> int:
        """Length of a header and its payload."""
        return self.header_bytes + self.chunk_bytes

    @property
    def batch_chunks(self) -> int:
        """Number of chunks in one call of a tier."""
        return max(1, min(_BATCH_BYTES // self.chunk_bytes, self.chunks // self.at_a_time))

    def __post_init__(self) -> None:
        count = self.at_a_time * self.batch_chunks
        pool = HostPool.create(PoolLayout(count, self.chunk_bytes))
        object.__setattr__(self, "pool", pool)
        headers = memoryview(mmap.mmap(-1, count * self.header_bytes))
        self.regions.extend([Region.of(headers), pool.region])
        for number in range(count):
            start = number * self.header_bytes
            header, payload = headers[start : start + self.header_bytes], pool.view(number)
            header[:], payload[:] = os.urandom(len(header)), os.urandom(len(payload))
            self.slots.append([header, payload])
            self.values.append(b"".join(self.slots[-1]))

    def value(self, number: int) -> bytes:
        """Return the value that belongs to a key."""
        return self.values[number % len(self.values)]

    def lanes(self) -> list[list[list[memoryview]]]:
        """The slots of each lane."""
        return [self.slots[lane :: self.at_a_time] for lane in range(self.at_a_time)]

    async def each(self, move: Callable[[int], Awaitable[object]]) -> None:
        """Call a function for each chunk, with its key's number, ``at_a_time`` at once."""
        rest = iter(range(self.chunks))

        async def lane() -> None:
            for index in rest:
                await move(index % self.keys)

        await asyncio.gather(*(lane() for _ in range(self.at_a_time)))


@dataclass(frozen=True)
class Figures:
    """The cost of one direction of one measurement.

    Attributes:
        seconds: wall time.
        cpu_s: processor time of the client.
    """

    seconds: float
    cpu_s: float


class Way(ABC):
    """One way to move chunks.

    Attributes:
        name: its name in the table.
    """

    name: ClassVar[str]

    def __init__(self, work: Work) -> None:
        self.work = work

    async def open(self) -> None:
        """Connect; not measured."""
        return

    async def close(self) -> None:
        """Release everything; not measured."""
        return

    @abstractmethod
    async def store(self) -> float | None:
        """Store all chunks; return seconds if its own clock is better than the caller's."""

    @abstractmethod
    async def load(self) -> float | None:
        """Load all chunks; return as :meth:`store` does."""

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process and its ended programs, thus of no server."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    def measure(self) -> dict[str, Figures]:
        """Store and load all chunks.

        Returns:
            The figures of each.
        """
        with asyncio.Runner(loop_factory=SystemClock().new_event_loop) as runner:
            try:
                return runner.run(self._measure())
            finally:
                close_blocking_threads(runner.get_loop())

    async def _measure(self) -> dict[str, Figures]:
        await self.open()
        try:
            return {one: await self._timed(getattr(self, one)) for one in OPERATIONS}
        finally:
            await self.close()

    async def _timed(self, move: Callable[[], Awaitable[float | None]]) -> Figures:
        start_cpu_s, start_s = self.cpu_s(), time.perf_counter()
        seconds = await move()
        wall_s = time.perf_counter() - start_s
        return Figures(wall_s if seconds is None else seconds, self.cpu_s() - start_cpu_s)


class Subject(ABC):
    """A backend with all the ways to use it; it runs while its context is open.

    Attributes:
        name: the backend's name.
        keys: number of different keys to move; all are different if ``None``.
        limit: the way to compare the others with.
        header_bytes: length of each chunk's header.
    """

    name: ClassVar[str]
    keys: ClassVar[int | None] = None
    limit: ClassVar[str]
    header_bytes: ClassVar[int] = 64

    @abstractmethod
    def ways(self, work: Work) -> Sequence[Way]:
        """Return all ways, kvtier's first."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all stored chunks."""

    @abstractmethod
    def __enter__(self) -> Subject: ...

    @abstractmethod
    def __exit__(self, *failure: object) -> None: ...
