"""What each way moves, and what it takes."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtier_sdk import SystemClock
from kvtier_sdk.blocking import close_blocking_threads

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
    """

    chunk_bytes: int
    header_bytes: int
    chunks: int
    keys: int
    at_a_time: int

    @property
    def object_bytes(self) -> int:
        """Length of a header with its payload."""
        return self.header_bytes + self.chunk_bytes

    @property
    def batch_chunks(self) -> int:
        """How many a tier is given in one call."""
        return max(1, min(_BATCH_BYTES // self.chunk_bytes, self.chunks // self.at_a_time))

    def buffers(self) -> list[memoryview]:
        """A header and a payload in memory of their own, aligned to pages and touched."""
        header, payload = mmap.mmap(-1, self.header_bytes), mmap.mmap(-1, self.chunk_bytes)
        header.write(os.urandom(len(header)))
        payload.write(os.urandom(len(payload)))
        return [memoryview(header), memoryview(payload)]

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
