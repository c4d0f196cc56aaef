"""Prints a sweep of the host pool's size on a terminal."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from kvtier_sdk.cli.replay import PoolSweep
from kvtier_sdk.options.units import format_bytes


def print_sweep_json(sweep: PoolSweep, chunk_bytes: int, file: TextIO = sys.stdout) -> None:
    """Print one JSON object, on stdout or into a file."""
    print(json.dumps(sweep.as_json(chunk_bytes)), file=file)


def print_sweep(sweep: PoolSweep, chunk_bytes: int) -> None:
    """Print the hit rate by size, and a suggested size."""
    console = Console(highlight=False, soft_wrap=True)
    pool = format_bytes(sweep.pool.slots * chunk_bytes)
    console.print(
        f"{sweep.requests:,} requests, {sweep.chunks:,} chunks of {format_bytes(chunk_bytes)}, "
        f"{sweep.distinct_chunks:,} of them distinct: "
        f"{format_bytes(sweep.distinct_chunks * chunk_bytes)}"
    )
    table = Table(box=None, pad_edge=False)
    for title in ("size", "chunks", "as host pool", "gained", f"as tier behind {pool}"):
        table.add_column(title, justify="right")
    last = None
    for point in sweep.points:
        gained = "" if last is None else f"{100 * sweep.rate(point.hit_chunks - last):+.2f}"
        last = point.hit_chunks
        table.add_row(
            format_bytes(point.slots * chunk_bytes),
            f"{point.slots:,}",
            f"{sweep.rate(point.hit_chunks):.2%}",
            gained,
            f"{100 * sweep.rate(sweep.tier_chunks(point)):+.2f}",
        )
    console.print(table)
    console.print("as tier: points of hit rate that it adds, if it is given every chunk")
    console.print(suggestion(sweep, chunk_bytes))
    console.print(_worth(sweep))


def _worth(sweep: PoolSweep) -> str:
    """Explain how the figures were obtained, and how exact they are."""
    if sweep.share < 1:
        return (
            f"{sweep.policy}: estimated with {sweep.share:.1%} of the chunks, in two halves that "
            f"differ by at most {100 * sweep.error:.1f} points; one request at a time"
        )
    return f"{sweep.policy}: what a replay without tiers hits, one request at a time"


def suggestion(sweep: PoolSweep, chunk_bytes: int) -> str:
    """Suggest a size, and say why."""
    point = sweep.suggested
    size = format_bytes(point.slots * chunk_bytes)
    rate = f"{sweep.rate(point.hit_chunks):.1%}"
    if point is sweep.points[-1]:
        why = "It holds every chunk."
    else:
        why = "Beyond it each doubling gains less than 1 point."
    return f"Suggested: {size}, {point.slots:,} slots, which hit {rate}. {why}"
