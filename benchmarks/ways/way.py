"""The chunks that a benchmark stores and loads, and the base classes of the measured programs."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from runner import Sample, must_be_equal
from support.tier_process import tier_processes

from kvtier_sdk import HostPool, PoolLayout, Region, SystemClock, format_bytes
from kvtier_sdk.aio.blocking import close_blocking_threads

# The maximum payload of one call to a tier.
_BATCH_BYTES = 8 * 2**20
#: Class names, because importing a module ``ways.<backend>_ways`` needs the backend's clients.
SUBJECTS = {
    "file": "FileSubject",
    "redis": "RedisSubject",
    "s3": "S3Subject",
    "mooncake": "MooncakeSubject",
}
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Work:
    """The chunks that each program stores and loads in one measurement."""

    chunk_bytes: int
    header_bytes: int
    chunks: int
    keys: int
    # The number of a client's connections or threads, or of concurrent calls to a tier.
    at_a_time: int
    # Header and payload of each chunk; the payload is a slot of the pool.
    slots: list[list[memoryview]] = field(init=False, default_factory=list)
    pool: HostPool = field(init=False)
    regions: list[Region] = field(init=False, default_factory=list)
    # Random bytes for each key.
    values: list[bytes] = field(init=False, default_factory=list)

    @property
    def object_bytes(self) -> int:
        return self.header_bytes + self.chunk_bytes

    @property
    def batch_chunks(self) -> int:
        return max(1, min(_BATCH_BYTES // self.chunk_bytes, self.chunks // self.at_a_time))

    def __post_init__(self) -> None:
        pool = HostPool.create(PoolLayout(self.chunks, self.chunk_bytes))
        object.__setattr__(self, "pool", pool)
        headers = memoryview(mmap.mmap(-1, self.chunks * self.header_bytes))
        self.regions.extend([Region.of(headers), pool.region])
        self.values.extend(os.urandom(self.object_bytes) for _ in range(self.keys))
        for number in range(self.chunks):
            start = number * self.header_bytes
            self.slots.append([headers[start : start + self.header_bytes], pool.view(number)])
        self.fill()

    def fill(self) -> None:
        for number, (header, payload) in enumerate(self.slots):
            value = memoryview(self.values[number % self.keys])
            header[:], payload[:] = value[: self.header_bytes], value[self.header_bytes :]

    def wipe(self) -> None:
        for _, payload in self.slots:
            np.frombuffer(payload, np.uint8).fill(0)

    def compare(self, number: int, payload: bytes | memoryview) -> None:
        """Exit if ``payload`` differs from the stored payload of chunk ``number``."""
        stored = memoryview(self.values[number % self.keys])[self.header_bytes :]
        must_be_equal(np.array_equal(*(np.frombuffer(one, np.uint8) for one in (stored, payload))))

    def batches(self) -> list[range]:
        """Return the range of chunk numbers for each call to a tier."""
        step = self.batch_chunks
        return [
            range(start, min(start + step, self.chunks)) for start in range(0, self.chunks, step)
        ]

    async def each(
        self, move: Callable[[_Item], Awaitable[object]], items: Iterable[_Item]
    ) -> None:
        """Call ``move`` for each item, with up to ``at_a_time`` calls at once."""
        rest = iter(items)

        async def lane() -> None:
            for item in rest:
                await move(item)

        await asyncio.gather(*(lane() for _ in range(self.at_a_time)))

    def in_threads(self, lane: Callable[[Iterator[_Item]], None], items: Sequence[_Item]) -> None:
        """Call ``lane`` in ``at_a_time`` threads, which share one iterator over the items."""
        rest = iter(items)
        with ThreadPoolExecutor(self.at_a_time) as threads:
            list(threads.map(lane, [rest] * self.at_a_time))


def cpu_clock() -> Callable[[], float]:
    """Return a clock of the CPU seconds of this process, its tiers and its ended children."""
    # Look for the processes now, because the search itself takes a millisecond of CPU.
    # Linux computes the id of a process's CPU clock from the process's id with this formula.
    tiers = [(~pid << 3) | 2 for pid in tier_processes(os.getpid())]

    def now_s() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        tiers_s = sum(map(time.clock_gettime, tiers))
        return time.process_time() + ended.ru_utime + ended.ru_stime + tiers_s

    return now_s


class Way(ABC):
    def __init__(self, work: Work) -> None:
        self.work = work

    async def open(self) -> None:
        """Connect, outside the measured time."""
        return

    async def close(self) -> None:
        """Release all resources, outside the measured time."""
        return

    @abstractmethod
    async def store(self) -> float | None:
        """Store all chunks. Return the seconds, or ``None`` if the caller must measure the time."""

    @abstractmethod
    async def load(self) -> float | None:
        """Load all chunks into their slots; return seconds or ``None``, as :meth:`store` does."""

    async def check(self) -> None:
        """Compare all loaded payloads, outside the measured time."""
        for number, (_, payload) in enumerate(self.work.slots):
            self.work.compare(number, payload)

    def samples(self) -> Iterator[Sample]:
        self.work.fill()
        with asyncio.Runner(loop_factory=SystemClock().new_event_loop) as runner:
            try:
                spent = runner.run(self._measure())
            finally:
                close_blocking_threads(runner.get_loop())
        chunk, mib = format_bytes(self.work.chunk_bytes), self.work.chunk_bytes / 2**20
        for operation, (seconds, spent_cpu_s) in spent.items():
            case, chunks = f"{operation} {chunk}", self.work.chunks
            yield case, "throughput", "MiB/s", chunks * mib / seconds
            yield case, "CPU a chunk", "us", spent_cpu_s / chunks * 1e6

    async def _measure(self) -> dict[str, tuple[float, float]]:
        await self.open()
        try:
            if self.work.keys < self.work.chunks:
                # Store all keys once, so that every measured store replaces a value.
                await self.store()
            stored = await self.cost(self.store)
            self.work.wipe()
            loaded = await self.cost(self.load)
            await self.check()
        finally:
            await self.close()
        return {"store": stored, "load": loaded}

    async def cost(self, move: Callable[[], Awaitable[float | None]]) -> tuple[float, float]:
        """Return the wall and CPU seconds of a store or a load."""
        cpu_s = cpu_clock()
        start_cpu_s, start_s = cpu_s(), time.perf_counter()
        seconds = await move()
        wall_s = time.perf_counter() - start_s
        return wall_s if seconds is None else seconds, cpu_s() - start_cpu_s


class ClientWay(Way):
    """A client that moves ``bytes`` objects instead of slots, ``at_a_time`` objects at once."""

    async def store(self) -> None:
        values, keys = self.work.values, self.work.keys
        await self.work.each(
            lambda number: self.put(number % keys, values[number % keys]), range(self.work.chunks)
        )

    async def load(self) -> None:
        keys = self.work.keys
        await self.work.each(lambda number: self.get(number % keys), range(self.work.chunks))

    async def check(self) -> None:
        """Load all values again and compare them, because the measured load discards the values."""

        async def compare(number: int) -> None:
            value = memoryview(await self.get(number))
            self.work.compare(number, value[self.work.header_bytes :])

        await self.work.each(compare, range(self.work.keys))

    @abstractmethod
    async def put(self, number: int, value: bytes) -> object: ...

    @abstractmethod
    async def get(self, number: int) -> bytes | memoryview: ...


class Subject(ABC):
    """A running backend, and the programs to measure with it."""

    # Total payload of all distinct keys; if ``None``, each chunk has its own key.
    keys_bytes: ClassVar[int | None] = None
    header_bytes: ClassVar[int] = 64
    url: str  # a tier of the backend, with room for 1 GiB

    def __init__(self, root: Path) -> None:
        self.opened = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root)
        self.directory = Path(self.opened.enter_context(folder))

    def close(self) -> None:
        self.opened.close()

    @abstractmethod
    def ways(self, work: Work) -> Mapping[str, Callable[[int], Way]]:
        """Map names to functions that make a way for a round; kvtier is first, the limit last."""

    @abstractmethod
    def clear(self) -> None: ...


def open_subject(backend: str, root: Path, **options: bool) -> closing[Subject]:
    """Start a backend; the subject's class describes the options."""
    kind = getattr(import_module(f"ways.{backend}_ways"), SUBJECTS[backend])
    return closing(kind(root, **options))
