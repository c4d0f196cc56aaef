"""What each way moves, and what it takes."""

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

from kvtier_sdk import HostPool, SystemClock
from kvtier_sdk.aio.blocking import close_blocking_threads
from kvtier_sdk.pool import PoolLayout

OPERATIONS = ("store", "load")
# What a tier is given in one call, at most.
_BATCH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Work:
    """What one measurement moves, each way once in each direction.

    Attributes:
        chunk_bytes: length of a payload.
        header_bytes: of what stands before it.
        chunks: how many are moved.
        keys: how many different ones are among them.
        at_a_time: connections of a client, or threads, and calls of a tier.
        slots: headers and payloads in slots of a host pool, as many as a tier has under way. All
            ways move them in turns: what stays in the processor's cache is sent in less time.
        values: the same, for clients that take objects of their own.
    """

    chunk_bytes: int
    header_bytes: int
    chunks: int
    keys: int
    at_a_time: int
    slots: list[list[memoryview]] = field(init=False, default_factory=list)
    values: list[bytes] = field(init=False, default_factory=list)

    @property
    def object_bytes(self) -> int:
        """Length of a header with its payload."""
        return self.header_bytes + self.chunk_bytes

    @property
    def batch_chunks(self) -> int:
        """How many a tier is given in one call."""
        return max(1, min(_BATCH_BYTES // self.chunk_bytes, self.chunks // self.at_a_time))

    def __post_init__(self) -> None:
        count = self.at_a_time * self.batch_chunks
        pool = HostPool.create(PoolLayout(count, self.chunk_bytes))
        for number in range(count):
            header, payload = mmap.mmap(-1, self.header_bytes), pool.view(number)
            header.write(os.urandom(len(header)))
            payload[:] = os.urandom(len(payload))
            self.slots.append([memoryview(header), payload])
            self.values.append(b"".join(self.slots[-1]))

    def value(self, number: int) -> bytes:
        """What a key's value is to be."""
        return self.values[number % len(self.values)]

    def lanes(self) -> list[list[list[memoryview]]]:
        """The slots, each lane's."""
        return [self.slots[lane :: self.at_a_time] for lane in range(self.at_a_time)]

    async def each(self, move: Callable[[int], Awaitable[object]]) -> None:
        """Call for each chunk, with its key's number, so many at a time."""
        rest = iter(range(self.chunks))

        async def lane() -> None:
            for index in rest:
                await move(index % self.keys)

        await asyncio.gather(*(lane() for _ in range(self.at_a_time)))


@dataclass(frozen=True)
class Figures:
    """What one direction of one measurement took.

    Attributes:
        seconds: on the wall.
        cpu_s: of the processor, on the client's side.
    """

    seconds: float
    cpu_s: float


class Way(ABC):
    """One way to move chunks.

    Attributes:
        name: what the table calls it.
    """

    name: ClassVar[str]

    def __init__(self, work: Work) -> None:
        self.work = work

    async def open(self) -> None:
        """Connect; not measured."""
        return

    async def close(self) -> None:
        """Let go of everything; not measured."""
        return

    @abstractmethod
    async def store(self) -> float | None:
        """Store all chunks; returns seconds where it knows better than its caller's clock."""

    @abstractmethod
    async def load(self) -> float | None:
        """Load all chunks; returns as :meth:`store` does."""

    def measure(self) -> dict[str, Figures]:
        """Store and load all chunks.

        Returns:
            What either took.
        """
        with asyncio.Runner(loop_factory=SystemClock().new_event_loop) as runner:
            try:
                return runner.run(self._measure())
            finally:
                close_blocking_threads(runner.get_loop())

    async def _measure(self) -> dict[str, Figures]:
        await self.open()
        try:
            return {operation: await _timed(getattr(self, operation)) for operation in OPERATIONS}
        finally:
            await self.close()


async def _timed(move: Callable[[], Awaitable[float | None]]) -> Figures:
    start_cpu_s, start_s = _cpu_s(), time.perf_counter()
    seconds = await move()
    wall_s = time.perf_counter() - start_s
    return Figures(wall_s if seconds is None else seconds, _cpu_s() - start_cpu_s)


def _cpu_s() -> float:
    """Of this process, and of the programs that it ran; a server is still running."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Subject(ABC):
    """A backend with all the ways to use it; a context manager, inside of which it runs.

    Attributes:
        name: the backend's.
        keys: how many different ones to move; all are different where it is ``None``.
        limit: the way that the others are compared with.
        header_bytes: of each chunk's header.
    """

    name: ClassVar[str]
    keys: ClassVar[int | None] = None
    limit: ClassVar[str]
    header_bytes: ClassVar[int] = 64

    @abstractmethod
    def ways(self, work: Work) -> Sequence[Way]:
        """Each way, kvtier's first."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all that was stored."""

    @abstractmethod
    def __enter__(self) -> Subject: ...

    @abstractmethod
    def __exit__(self, *failure: object) -> None: ...
