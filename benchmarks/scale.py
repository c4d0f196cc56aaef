"""Measure the cost of many slots, tiers and waiting requests, and of a start over a large root.

Usage: python benchmarks/scale.py [SECTION ...] [--slots N ...] [--root DIR] ...

    slots     the manager's memory and time, by the number of slots of the host pool
    tiers     the times of a step and a lookup, by the number of tiers
    waiting   10,000 requests of 500 chunks, looked up in each step while they wait for a tier
    files     the start of a file tier over a root with a million chunks

Times are medians of the calling thread's CPU time; in ``files``, they are wall time. Memory is the
growth of the process's resident memory. Each measurement runs in a new process.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import Series
from runner import Benchmark, freeze, positive
from support.workbench import Workbench

from kvtier_file.namespace import shard_of
from kvtier_sdk import (
    RequestContext,
    SystemClock,
    TieringConfig,
    load_policy,
    make_offload_key,
)
from kvtier_sdk.engine import TieringManager, open_manager, open_pool

_CHUNK_BYTES = 4096
_REQUEST_CHUNKS = 500
_US_A_CHUNK = 1e6 / _REQUEST_CHUNKS
_WORKBENCH = Workbench(_CHUNK_BYTES, alignment=_CHUNK_BYTES)
_SECTIONS = ("slots", "tiers", "waiting", "files")

Row = dict[str, float]
_Measure = Callable[..., Row]
_Call = Callable[..., Any]


def main() -> None:
    bench = Benchmark(__doc__, root="/dev/shm")
    bench.option("sections", nargs="*", choices=[[], *_SECTIONS], help="default: all")
    sizes = {"nargs": "+", "type": positive}
    bench.option("--slots", default=[10_000, 100_000, 1_000_000], **sizes)
    bench.option("--tiers", default=[1, 4, 16, 64], **sizes)
    bench.option("--requests", type=positive, default=10_000, help="that wait")
    bench.option("--files", type=positive, default=1_000_000, help="made under the root")
    options = bench.parse()

    def table(title: str, rows: dict[str, Row]) -> None:
        bench.add(
            [
                Series(title, case, "kvtier", name, "", [value])
                for case, row in rows.items()
                for name, value in row.items()
            ]
        )

    def by_size(title: str, corner: str, sizes: Sequence[int], measure: _Measure) -> None:
        table(title, {f"{size:,} {corner}": _apart(measure, size) for size in sizes})

    sections = options.sections or _SECTIONS
    if "slots" in sections:
        title = "slots of the pool: bytes a slot, us a chunk, ms a walk"
        by_size(title, "slots", options.slots, _measure_slots)
    if "tiers" in sections:
        title = "tiers: us a step, and a request of 500 chunks, us a chunk"
        by_size(title, "tiers", options.tiers, _measure_tiers)
    if "waiting" in sections:
        title = f"{options.requests:,} requests of {_REQUEST_CHUNKS} chunks that wait: ms a step"
        measures = (_measure_waiting, _measure_answers)
        rows = [_apart(measure, options.requests) for measure in measures]
        table(title, {"": rows[0] | rows[1]})
    if "files" in sections:
        with bench.folder() as root:
            _make_files(root, options.files)
            title = "start of the file tier: seconds from before open, MiB"
            starts = {f"start {n}": _apart(_measure_start, root, options.files) for n in (1, 2)}
            table(title, starts)
    bench.finish()


# --- slots --------------------------------------------------------------------------------------


@dataclass
class _Slots:
    """A host pool without memory, because no tier accesses the slots."""

    slots: int
    chunk_bytes: int = _CHUNK_BYTES


def _measure_slots(slots: int) -> Row:
    keys = _Keys()
    before_bytes = _resident_bytes()
    pool: Any = _Slots(slots)
    manager = TieringManager(pool, policy=load_policy("lru")(), clock=SystemClock())
    meter = _Meter()
    # Fill the pool, so that each _compute() of the next loop evicts and each _reuse() hits.
    for _ in range(-(-slots // _REQUEST_CHUNKS)):
        _compute(manager, _Meter(), next(keys), "")
    row = {"bytes": (_resident_bytes() - before_bytes) / slots}
    freeze()
    for _ in range(50):
        _compute(manager, meter, next(keys), ", evicting")
        _reuse(manager, meter, keys.earlier(min(slots, 5000) // _REQUEST_CHUNKS))
        meter.call("ms usage", 1e3, manager.usage)
    return {**row, **meter.medians()}


def _compute(manager: TieringManager, meter: _Meter, keys: Sequence[bytes], evicts: str) -> None:
    request = RequestContext("compute")
    manager.on_new_request(request)
    meter.each("lookup, miss", manager.lookup, keys, request)
    meter.call(f"prepare_store{evicts}", _US_A_CHUNK, manager.prepare_store, keys, request)
    meter.call("complete_store", _US_A_CHUNK, manager.complete_store, keys, request)
    manager.on_request_finished(request)
    manager.on_schedule_end()


def _reuse(manager: TieringManager, meter: _Meter, keys: Sequence[bytes]) -> None:
    request = RequestContext("reuse")
    manager.on_new_request(request)
    meter.each("lookup, hit", manager.lookup, keys, request)
    meter.call("prepare_load", _US_A_CHUNK, manager.prepare_load, keys, request)
    meter.call("complete_load", _US_A_CHUNK, manager.complete_load, keys, request)
    manager.on_request_finished(request)
    meter.call("end of step", _US_A_CHUNK, manager.on_schedule_end)


# --- tiers and waiting requests -----------------------------------------------------------------


@contextmanager
def _engine(tiers: int, **options: object) -> Iterator[TieringManager]:
    """Open a manager over memory tiers, each in its own thread."""
    entries = [{"type": "memory", "name": f"tier{index}", **options} for index in range(tiers)]
    size = {"slots": 4 * _REQUEST_CHUNKS, "chunk_bytes": _CHUNK_BYTES}
    config = TieringConfig.from_dict(
        {**size, "policy": "lru", "shutdown_timeout": 1, "tiers": entries}
    )
    with open_pool(config) as pool, open_manager(pool, config, _WORKBENCH.namespace) as manager:
        yield manager


def _measure_tiers(tiers: int) -> Row:
    keys, meter = _Keys(), _Meter()
    patient = dict.fromkeys(("lookup_deadline", "load_deadline", "store_deadline"), 600)
    with _engine(tiers, **patient) as manager:
        freeze()
        for _ in range(500):
            meter.call("empty step, us", 1e6, manager.on_schedule_end)
        for _ in range(10):
            request, chunks = RequestContext("r"), next(keys)
            manager.on_new_request(request)
            meter.each("lookup", manager.lookup, chunks, request)
            meter.call("hand over", _US_A_CHUNK, manager.on_schedule_end)
            answers = _Meter()
            while manager.lookup_prefix(chunks, request)[1]:
                time.sleep(1e-3)
                answers.call("answers", _US_A_CHUNK, manager.on_schedule_end)
            meter.samples["answers"].append(sum(answers.samples["answers"]))
            meter.call("prepare_store", _US_A_CHUNK, manager.prepare_store, chunks, request)
            meter.call("complete_store", _US_A_CHUNK, manager.complete_store, chunks, request)
            manager.on_request_finished(request)
            while manager.has_pending_work():
                manager.on_schedule_end()
                time.sleep(1e-4)
    return meter.medians()


def _make_waiting(
    manager: TieringManager, requests: int
) -> list[tuple[RequestContext, Sequence[bytes]]]:
    keys = _Keys()
    waiting = [(RequestContext(f"r{index}"), next(keys)) for index in range(requests)]
    for request, _ in waiting:
        manager.on_new_request(request)
    return waiting


def _measure_waiting(requests: int) -> Row:
    """Measure steps in which no tier answers."""
    meter = _Meter()
    with _engine(1, latency=3600, lookup_deadline=3600) as manager:
        waiting = _make_waiting(manager, requests)

        def look_up() -> None:
            for request, chunks in waiting:
                _, pending = manager.lookup_prefix(chunks, request)
                assert pending

        before_bytes = _resident_bytes()
        freeze()
        meter.call("first lookups", 1e3, look_up)
        meter.call("hand over", 1e3, manager.on_schedule_end)
        used_bytes = _resident_bytes() - before_bytes
        for _ in range(5):
            meter.call("later lookups", 1e3, look_up)
            meter.call("end of a later step", 1e3, manager.on_schedule_end)
    return {**meter.medians(), "MiB": used_bytes / 2**20}


def _measure_answers(requests: int) -> Row:
    """Measure the steps until every request has its answers, which are all misses."""
    meter = _Meter()
    with _engine(1) as manager:
        waiting = _make_waiting(manager, requests)

        def step() -> None:
            nonlocal waiting
            # As in an engine, only requests that still wait are looked up again.
            waiting = [one for one in waiting if manager.lookup_prefix(one[1], one[0])[1]]
            manager.on_schedule_end()

        freeze()
        while waiting:
            meter.call("step", 1e3, step)
            time.sleep(0.01)
    steps = meter.samples["step"]
    return {"steps until all are answered": len(steps), "the longest of them": max(steps)}


# --- files --------------------------------------------------------------------------------------


def _make_files(root: Path, files: int) -> None:
    """Make sparse files, each as long as a stored chunk."""
    directory = root / _WORKBENCH.namespace.fingerprint
    for shard in range(256):
        (directory / f"{shard:02x}").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    directory.chmod(0o700)
    for key in itertools.islice(itertools.chain.from_iterable(_Keys()), files):
        fd = os.open(directory / shard_of(key) / f"{key.hex()}.kv", os.O_WRONLY | os.O_CREAT, 0o600)
        os.truncate(fd, _WORKBENCH.object_bytes)
        os.close(fd)


def _measure_start(root: Path, files: int) -> Row:
    return asyncio.run(_start(root, files))


async def _start(root: Path, files: int) -> Row:
    # Keep the capacity near the files' size, because the tier refuses more than the disk's size.
    capacity = (files + _REQUEST_CHUNKS) * _WORKBENCH.object_bytes
    tier = _WORKBENCH.make(f"file://{root}", capacity=capacity, min_free=0)
    request, transfer = _WORKBENCH.request, _WORKBENCH.empty(b"a new chunk")
    there = next(_Keys())
    before_bytes, started_s = _resident_bytes(), time.perf_counter()
    row: Row = {}

    async def note(name: str, call: Any) -> Any:
        result = await call
        row[name] = time.perf_counter() - started_s
        return result

    await note("open", tier.open())
    hits, more, stored, usage = await asyncio.gather(
        note("lookup", tier.lookup(there[:1], request)),
        note("500 lookups", tier.lookup(there, request)),
        note("store", tier.store([transfer])),
        note("account", tier.usage()),
    )
    assert (list(hits), list(more), stored) == ([True], [True] * len(there), [None])
    assert usage.chunks >= files
    row["MiB"] = (_resident_bytes() - before_bytes) / 2**20
    await tier.delete([transfer.key])
    await tier.close()
    return row


# --- shared by the sections ---------------------------------------------------------------------


class _Keys(Iterator[list[bytes]]):
    """An endless iterator over requests' keys, each key as long as an engine's."""

    def __init__(self) -> None:
        self._requests = 0

    def __next__(self) -> list[bytes]:
        self._requests += 1
        return self.earlier(1)

    def earlier(self, requests: int) -> list[bytes]:
        """Return the keys of an earlier request; ``requests`` is 1 for the latest request."""
        start = (self._requests - requests + 1) * _REQUEST_CHUNKS
        numbers = range(start, start + _REQUEST_CHUNKS)
        return [make_offload_key(number.to_bytes(32, "little")) for number in numbers]


class _Meter:
    """CPU times of calls in the calling thread, by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)

    def call(self, name: str, scale: float, function: Callable[..., Any], *args: Any) -> None:
        """Make one call, and record its CPU seconds multiplied by ``scale``."""
        started_s = time.thread_time()
        function(*args)
        self.samples[name].append((time.thread_time() - started_s) * scale)

    def each(self, name: str, function: _Call, keys: Sequence[bytes], *a: Any) -> None:
        """Call ``function`` with each key; record the mean microseconds per call."""

        def run() -> None:
            for key in keys:
                function(key, *a)

        self.call(name, _US_A_CHUNK, run)

    def medians(self) -> Row:
        return {name: statistics.median(samples) for name, samples in self.samples.items()}


def _apart(measure: _Measure, *arguments: Any) -> Row:
    """Measure in a new process, to exclude the memory of other measurements."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as processes:
        return processes.submit(measure, *arguments).result()


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
