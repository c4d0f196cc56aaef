"""Cost of the manager for the scheduler's thread, beside vLLM's own manager and beside no tiers.

Usage: python benchmarks/scheduler.py [TRACE] [--rounds N] [--concurrency N ...]

First the cost: CPU microseconds of the scheduler's thread per chunk, in the calls of vLLM's
connector (see ``connector_loop.py``). The sides are the memory tier and no tier, both with the
policy ``lru`` too, and, where vllm is installed, vLLM's tiering manager with a tier in memory: once
behind threads, as its tiers for files and objects work, and once answering at once, the best case,
which no real store offers. Between two steps the tiers finish all their jobs, so that all sides do
the same work. All bytes that are loaded are compared.

Then the interference: wall microseconds of a single call while the file tier writes as fast as it
can, beside the same loop without tiers. Here the steps have a fixed length and do not wait for the
tier, so that its queue is full.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from connector_loop import ConnectorLoop, Side
from kvtier_side import KVTierSide
from runner import Benchmark, Sample, positive

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.core import CORE
from kvtier_sdk.options.units import parse_bytes
from kvtier_sdk.replay import ReplayRequest, chat_workload, read_trace

_SMALL_CHUNK_BYTES = 4096
_VLLM_SIDES = {"vLLM, thread": True, "vLLM, at once": False}


def main() -> None:
    """Measure with each number of requests that overlap."""
    bench = Benchmark(__doc__, rounds=3)
    bench.option("trace", nargs="?", type=Path, help="block-hash trace; default: chats")
    bench.option("--requests", type=positive, default=1000, help="of the chats")
    bench.option("--concurrency", type=positive, nargs="+", default=[1, 8], help="%(default)s")
    bench.option("--cost-only", action="store_true", help="leave the interference out")
    bench.option("--slots", type=positive, default=2000, help="of the primary tier")
    bench.option(
        "--file-chunk-bytes",
        type=parse_bytes,
        default="64KiB",
        help="of a chunk beside the saturated file tier (%(default)s)",
    )
    bench.option("--step-ms", type=float, default=2.0, help="of the model's run beside it")
    options = bench.parse()
    workload = read_trace(options.trace) if options.trace else chat_workload(options.requests, 0)
    loop = SystemClock().new_event_loop()
    loop.close()
    print(
        f"Python {platform.python_version()}, {CORE} core, event loop of "
        f"{type(loop).__module__.split('.')[0]}, {sum(len(one.keys) for one in workload)} chunks"
    )
    slots, chunk_bytes = options.slots, options.file_chunk_bytes
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.root) as directory:
        step_s = options.step_ms / 1e3

        def make_saturated() -> KVTierSide:
            url = f"file://{tempfile.mkdtemp(dir=directory)}"
            return KVTierSide(slots, chunk_bytes, url, step_s)

        saturated: dict[str, Callable[[], KVTierSide]] = {
            "file tier": make_saturated,
            "no tier": lambda: KVTierSide(slots, chunk_bytes, None, step_s),
        }
        for concurrency in options.concurrency:
            group = f"{concurrency} at a time"
            play = partial(_play, workload, concurrency, _SMALL_CHUNK_BYTES)
            sides = _sides(slots, bench).items()
            bench.measure(group, {name: partial(_cost, play, make) for name, make in sides})
            play = partial(_play, workload, concurrency, chunk_bytes)
            beside = {name: partial(_beside, play, make) for name, make in saturated.items()}
            if not options.cost_only:
                bench.measure(group, beside)
    bench.finish()


def _sides(slots: int, bench: Benchmark) -> dict[str, Callable[[], Side]]:
    ours = partial(KVTierSide, slots, _SMALL_CHUNK_BYTES)
    sides: dict[str, Callable[[], Side]] = {
        "memory tier": partial(ours, "memory:"),
        "memory tier, lru": partial(ours, "memory:", policy="lru"),
        "no tier": ours,
        "no tier, lru": partial(ours, policy="lru"),
    }
    if importlib.util.find_spec("vllm") is None:
        bench.absent = dict.fromkeys(_VLLM_SIDES, "vllm is not installed here")
        return sides
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_side import VLLMSide

    theirs = partial(VLLMSide, slots, _SMALL_CHUNK_BYTES)
    return sides | {
        name: partial(theirs, threaded=threaded) for name, threaded in _VLLM_SIDES.items()
    }


def _cost(
    play: Callable[..., ConnectorLoop], make: Callable[[], Side], number: int
) -> Iterator[Sample]:
    with closing(make()) as side:
        loop = play(side, time.thread_time_ns)
    yield from loop.costs()
    yield from loop.percentiles("CPU of a call")


def _beside(
    play: Callable[..., ConnectorLoop], make: Callable[[], KVTierSide], number: int
) -> Iterator[Sample]:
    with closing(make()) as side:
        loop = play(side, time.perf_counter_ns)
        for tier in side.manager.stats[1:]:
            yield "tier", "moved", "MiB", (tier.stored_bytes + tier.loaded_bytes) / 2**20
            yield "tier", "dropped", "chunks", float(sum(tier.dropped.values()))
    yield from loop.percentiles("a call")


def _play(
    workload: Sequence[ReplayRequest],
    concurrency: int,
    chunk_bytes: int,
    side: Side,
    clock_ns: Callable[[], int],
) -> ConnectorLoop:
    loop = ConnectorLoop(side, chunk_bytes, clock_ns)
    # As vLLM's engine does after its start: imported modules need not be collected every time.
    gc.collect()
    gc.freeze()
    try:
        loop.play(workload, concurrency)
    finally:
        gc.unfreeze()
    return loop


if __name__ == "__main__":
    main()
