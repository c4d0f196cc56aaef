"""Prints a replay's report on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtier_sdk.cli.replay import ReplayReport
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.units import format_bytes


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs; yield a function that sets its position."""
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # In a file or a pipe, a bar would be noise.
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("replay", total=total)
        yield lambda done: bar.update(task, completed=done)


def print_json(report: ReplayReport, file: TextIO = sys.stdout) -> None:
    """Print one JSON object, on stdout or into a file."""
    print(json.dumps(report.as_json()), file=file)


def print_table(report: ReplayReport, *, overlapped: bool) -> None:
    """Print the figures, with notes on them."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{report.requests:,} requests, {report.chunks:,} chunks of "
        f"{format_bytes(report.chunk_bytes)}, {report.elapsed_s:.1f} s"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("tier")
    for title in ("hit chunks", "hit rate", "stored", "GB/s", "loaded", "GB/s", "evicted chunks"):
        table.add_column(title, justify="right")
    for tier in report.tiers:
        table.add_row(tier.name, *_row(tier, report))
    table.add_row("all", f"{report.hit_chunks:,}", f"{report.hit_rate:.2%}")
    console.print(table)
    if len(report.tiers) > 1:
        of_each = "; jobs that overlap count each" if overlapped else ""
        console.print(f"GB/s: bytes over the time that store or load jobs were under way{of_each}")
    us = report.scheduler_us
    console.print(
        f"scheduler thread: {us['mean']:.1f} us of CPU per chunk; a request's mean per chunk: "
        f"p50 {us['p50']:.1f} us, p99 {us['p99']:.1f} us, max {us['max']:.1f} us"
    )
    for tier in report.tiers:
        for reason, count in sorted(tier.failures.items()):
            console.print(f"failed: {count:,} chunks, {tier.name} {reason}")
        for reason, count in sorted(tier.dropped.items()):
            console.print(f"dropped: {count:,} chunks, {tier.name} {reason}")
        for error in tier.errors:
            console.print(f"  {one_line(error)}", markup=False)
    if report.dropped and overlapped:
        console.print(
            "Requests that overlap do not wait for room: a chunk that was dropped on its way "
            "down is a miss the next time. --concurrency 1 waits, and drops nothing."
        )
    console.print(f"dropped: {report.dropped:,} chunks")
    wrong = f"{report.wrong_bytes:,} of them wrong" if report.wrong_bytes else "all equal"
    console.print(f"compared with what was stored: {report.compared_bytes:,} bytes, {wrong}")


def _row(tier: TierStats, report: ReplayReport) -> list[str]:
    rate = tier.hit_chunks / report.chunks if report.chunks else 0.0
    return [
        f"{tier.hit_chunks:,}",
        f"{rate:.2%}",
        format_bytes(tier.stored_bytes),
        _speed(tier.stored_bytes, tier.store_s, report.elapsed_s),
        format_bytes(tier.loaded_bytes),
        _speed(tier.loaded_bytes, tier.load_s, report.elapsed_s),
        f"{tier.evicted_chunks:,}",
    ]


def _speed(size_bytes: int, jobs_s: float, elapsed_s: float) -> str:
    # Overlapping jobs each count in full, so their sum may be longer than the whole run.
    duration_s = min(jobs_s, elapsed_s)
    return f"{size_bytes / duration_s / 1e9:.2f}" if duration_s else "-"
