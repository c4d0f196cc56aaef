"""``kvtier bench``: measures tiers as an engine's runner calls them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.cli.drawing import Chart, Series, svg_file
from kvtier_sdk.cli.replay.bystanders import EvictOthersOption, check_bystanders
from kvtier_sdk.cli.replay.sessions import percentile
from kvtier_sdk.cli.terminal import JsonOption, print_columns, progress, read_flag, say
from kvtier_sdk.cli.tier.maintenance import pages
from kvtier_sdk.cli.tier_check import like_kv
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.errors import ConfigError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening import BlockingTier
from kvtier_sdk.options.units import format_bytes, format_seconds, parse_bytes
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.runner.jobs import Job, JobResult, Operation, Verdict
from kvtier_sdk.types import Capability, OffloadKey, RequestContext, make_offload_key

_REQUEST = RequestContext("kvtier bench")
_STORE, _LOAD = Operation.STORE, Operation.LOAD
_COLORS = ("host", "tier1", "tier2", "tier3")
_SETTLE_S = 30.0


def bench_command(
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL...", help="Tiers, for example 'file:///data/try' 'memory:'."),
    ],
    chunk: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", show_default="2MiB 128KiB", help="Size of a chunk; repeat."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, show_default="1 16", help="Chunks of a job; repeat."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Jobs that are under way together.")] = 4,
    total: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that is written into each tier.")
    ] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="How often each tier has its turn.")] = 3,
    evict_others: EvictOthersOption = False,
    plot: Annotated[
        typer.FileTextWrite | None,
        typer.Option(metavar="FILE", lazy=False, help="Draw MB/s into this file, as SVG."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure tiers as an engine uses them: MB/s, latency and CPU of stores and loads.

    The chunks have random content and unique keys. Queues, digests and deadlines apply, and each
    tier runs in a thread or process, as under an engine. The chunks are deleted at the
    end, and after Ctrl-C. MB/s are medians of the rounds. CPU is the time of this process and of
    the tiers' processes, without servers.

        kvtier bench file:///data/try memory: --plot bench.svg

    'kvtier plan --devices FILE' reads the output of --json. The exit status is 1 if a tier fails.
    """
    given = chunk or ("2MiB", "128KiB")
    sizes = dict.fromkeys(read_flag("--chunk", parse_bytes, size) for size in given)
    batches = dict.fromkeys(batch or (1, 16))
    options = {"slots": 1, "chunk_bytes": max(sizes), "tiers": urls}
    config = TieringConfig.from_dict(options, where="command line")
    specs = [spec.needed() for spec in config.tiers]
    turns = rounds * len(sizes) * len(batches)
    share_bytes = read_flag("--total", parse_bytes, total) // turns
    least_bytes = max(sizes) * max(batches)
    if share_bytes < least_bytes:
        least = format_bytes(turns * least_bytes)
        raise ConfigError(f"--total {total}: {rounds} rounds of these chunks need {least}")
    for spec in specs:
        if Capability.DELETE not in spec.tier_class.capabilities:
            raise ConfigError(f"tier {spec.name!r}: it cannot delete what a benchmark writes")
    if not evict_others:
        check_bystanders(specs, SystemClock(), "benchmark")
    figures = []
    with progress("bench", turns * len(specs)) as advance:
        for size in sizes:
            of_size = [
                Figures(spec.name, spec.backend, operation.value, size, chunks)
                for chunks in batches
                for operation in (_STORE, _LOAD)
                for spec in specs
            ]
            _measure(specs, of_size, at_once, rounds, share_bytes, advance)
            figures += of_size
    if plot is not None:
        plot.write(svg_file(_chart(figures)))
    if as_json:
        print(json.dumps({"measured": [of.as_json() for of in figures]}))
        return
    titles = ("tier", "", "chunk", "batch", "MB/s", "p50", "p99", "CPU s/GB")
    print_columns([titles, *(of.row() for of in figures)], 2)
    say(
        f"{at_once} jobs at a time, as far as --total allows; p50 and p99: of a job, from its "
        "hand-over until its result"
    )


@dataclass(slots=True)
class Figures:
    tier: str
    backend: str
    operation: str
    chunk_bytes: int
    batch: int
    rates: list[float] = field(default_factory=list)
    jobs_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    moved_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        ordered = sorted(found.pop("jobs_s"))
        found["bytes_per_s"] = median(found.pop("rates"))
        found |= {f"p{of}_s": percentile(ordered, of) for of in (50, 99)}
        return found | {"cpu_s_per_gb": found.pop("cpu_s") / self.moved_bytes * 1e9}

    def row(self) -> tuple[str, ...]:
        found = self.as_json()
        times = [format_seconds(found[name]) for name in ("p50_s", "p99_s")]
        case = self.tier, self.operation, format_bytes(self.chunk_bytes), f"{self.batch}"
        rates = f"{found['bytes_per_s'] / 1e6:,.0f}", *times, f"{found['cpu_s_per_gb']:.2f}"
        return (*case, *rates)


def _chart(figures: Sequence[Figures]) -> Chart:
    lines: dict[str, list[Figures]] = {}
    for of in figures:
        lines.setdefault(f"{of.tier} {of.operation}", []).append(of)
    first, *_ = lines.values()
    heads = [f"{of.batch} x {format_bytes(of.chunk_bytes)}" for of in first]
    series = [
        Series(name, color, [of.as_json()["bytes_per_s"] / 1e6 for of in its])
        for (name, its), color in zip(lines.items(), cycle(_COLORS), strict=False)
    ]
    text = "{:,.0f}".format
    return Chart("curve", "MB/s", "", "chunks of a job", heads, heads, series, text)


def _measure(
    specs: Sequence[TierSpec],
    figures: Sequence[Figures],
    at_once: int,
    rounds: int,
    share_bytes: int,
    advance: Callable[[int], None],
) -> None:
    """Measure all tiers with chunks of one size. Each round starts with a different tier."""
    size = figures[0].chunk_bytes
    slots = min(share_bytes // size, at_once * max(of.batch for of in figures))
    with ExitStack() as opened:
        pool = opened.enter_context(closing(HostPool.create(PoolLayout(slots, size))))
        for slot in range(slots):
            pool.view(slot)[:] = like_kv(size)
        tiers = [opened.enter_context(_open(spec, pool)) for spec in specs]
        for number, turn in product(range(rounds), range(len(specs))):
            at = (number + turn) % len(specs)
            its = figures[at :: len(specs)]
            for store, load in zip(its[::2], its[1::2], strict=True):
                jobs = share_bytes // (size * store.batch)
                lanes = min(at_once, jobs)
                keys = [make_offload_key(os.urandom(32)) for _ in range(jobs * store.batch)]
                try:
                    _move(tiers[at], _STORE, keys, store, lanes)
                    _move(tiers[at], _LOAD, keys, load, lanes)
                except BaseException:
                    with suppress(TierError):
                        _delete(tiers[at], keys)
                    raise
                _delete(tiers[at], keys)
                advance(1)


@contextmanager
def _open(spec: TierSpec, pool: HostPool) -> Iterator[BlockingTier]:
    # The namespace has a dtype, like an engine's, because option 'compress' needs it.
    facts = {"engine": "kvtier bench", "dtype": "bfloat16", "chunk_bytes": pool.chunk_bytes}
    tier = BlockingTier.make(spec, pool, Namespace(facts), clock=SystemClock())
    try:
        tier.client.open()
        yield tier
    finally:
        tier.client.close(_SETTLE_S)


def _delete(tier: BlockingTier, keys: Sequence[OffloadKey]) -> None:
    # Wait, because a store that ends after the deletion would leave its chunks behind.
    tier.wait(lambda: not tier.client.jobs.running, _SETTLE_S)
    for page in pages(keys):
        _check(tier, tier.result_of(tier.client.delete(page)))


def _move(
    tier: BlockingTier, operation: Operation, keys: Sequence[OffloadKey], of: Figures, at_once: int
) -> None:
    """Store or load chunks, with up to ``at_once`` jobs in separate slots."""
    clock, client = SystemClock(), tier.client
    give = client.store if operation is _STORE else client.load
    waiting = pages(keys, of.batch)
    running: dict[int, tuple[Job, float]] = {}
    started_cpu_s, started_s = _cpu_s(), clock.now_s()
    while True:
        for lane, page in zip(set(range(at_once)) - set(running), waiting, strict=False):
            slots = list(range(lane * of.batch, lane * of.batch + len(page)))
            job = give(page, slots, _REQUEST, whole=True, tag=lane)
            if job is None:
                raise ConfigError(
                    f"{client.spec.name}: its queue ('max_queue') does not take {at_once} jobs of "
                    f"{of.batch} chunks of {format_bytes(of.chunk_bytes)}; give a smaller --at-once"
                )
            running[lane] = job, clock.now_s()
        if not running:
            break
        client.flush()
        tier.wait(lambda: any(job.result is not None for job, _ in running.values()))
        now_s = clock.now_s()
        for lane, (job, began_s) in list(running.items()):
            if job.result is not None:
                _check(tier, job.result)
                of.jobs_s.append(now_s - began_s)
                del running[lane]
    moved_bytes = len(keys) * of.chunk_bytes
    of.rates.append(moved_bytes / (clock.now_s() - started_s))
    of.cpu_s += _cpu_s() - started_cpu_s
    of.moved_bytes += moved_bytes


def _check(tier: BlockingTier, result: JobResult) -> None:
    for verdict in result.verdicts:
        if verdict is not Verdict.OK:
            raise TierError(result.error or f"{tier.client.spec.name}: a chunk is {verdict.value}")


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its tiers' processes."""
    pids = [os.getpid()]
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or this kernel does not list children
            pids += map(int, (task / "children").read_text().split())
    total_s = 0.0
    for pid in pids:
        with suppress(OSError):  # the process has ended
            # This is how Linux derives the id of a process's CPU clock from the process's id.
            total_s += time.clock_gettime((~pid << 3) | 2)
    return total_s
