"""``kvtier top``: a live table of a running engine's tiers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier_sdk.cli.engine import Socket, ask_engine, in_words, wait
from kvtier_sdk.cli.terminal import read_flag, share
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.units import format_bytes, format_seconds, parse_seconds
from kvtier_sdk.runner.survey import contents_in_words
from kvtier_sdk.types import Usage

_Status = Mapping[str, Any]

_NUMBERS = ("hits/s", "share", "found", "load\nGB/s", "store\nGB/s", "queue", "failed", "dropped")
_PIPE_WIDTH = 200
#: An engine without a step for this long is idle or stuck.
_LONG_STEP_S = 2.0


def top_command(
    socket: Socket,
    interval: Annotated[
        str, typer.Option(metavar="DURATION", help="Time between two looks, and of the rates.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each look as a line of JSON: counters, no rates.")
    ] = False,
) -> None:
    """Show a running engine's tiers live: hits, throughput, queues, breakers, drops, space.

    On a terminal the table is redrawn until Ctrl-C; in a pipe each interval prints another table.
    """
    interval_s = read_flag("--interval", parse_seconds, interval)
    if as_json:
        for look in islice(_looks(socket, interval_s), 1 if once else None):
            print(json.dumps(look), flush=True)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    frames = islice(_frames(socket, interval_s), 1 if once else None)
    if console.is_terminal and not once:
        with Live(console=console, auto_refresh=False) as live:
            for frame in frames:
                live.update(frame, refresh=True)
    else:
        for frame in frames:
            console.print(frame)


def _frames(socket: Path, interval_s: float) -> Iterator[Group]:
    for before, now in pairwise(_looks(socket, interval_s)):
        # A restarted engine counts from 0, so rates since the last look would be wrong.
        if now["uptime_s"] > before["uptime_s"]:
            yield _frame(before, now)


def _looks(socket: Path, interval_s: float) -> Iterator[_Status]:
    while True:
        yield ask_engine(socket, command="status")
        wait(interval_s)


def _frame(before: _Status, now: _Status) -> Group:
    duration_s = now["uptime_s"] - before["uptime_s"]
    # Use narrow gaps, because the table must fit into 80 characters.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tier")
    table.add_column("state")
    for title in (*_NUMBERS, "used"):
        table.add_column(title, justify="right", no_wrap=True)
    rows = [(before["host"], now["host"]), *zip(before["tiers"], now["tiers"], strict=True)]
    hits = sum(tier["hit_chunks"] - old["hit_chunks"] for old, tier in rows)
    for old, tier in rows:
        cells = (*_row(old, tier, hits, duration_s), _used(tier, now["pool"]))
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    notes = (Text(one_line(note)) for note in _notes(now))
    return Group(Text(one_line(_title(now))), table, *notes)


def _title(now: _Status) -> str:
    pool, trace = now["pool"], now["trace"]
    title = (
        f"engine {now['pid']}, up {format_seconds(round(now['uptime_s']))}; host pool of "
        f"{pool['slots']:,} slots: {pool['free']:,} free, {pool['pinned']:,} pinned"
    )
    if trace is not None:
        title += f"; trace: {trace['written_requests']:,} requests"
        if trace["dropped_requests"]:
            title += f", {trace['dropped_requests']:,} missing"
    if now["idle_s"] > _LONG_STEP_S:
        title += f"; no step for {format_seconds(round(now['idle_s']))}"
    return title


def _row(old: _Status, tier: _Status, hits: int, duration_s: float) -> list[str]:
    def gained(name: str) -> float:
        return float(tier[name] - old[name])

    asked = gained("found_chunks") + gained("absent_chunks")
    queues = [tier[f"{job}_queue_bytes"] for job in ("load", "store") if "is_drained" in tier]
    return [
        tier["name"],
        _state(tier),
        f"{gained('hit_chunks') / duration_s:,.0f}",
        share(gained("hit_chunks"), hits),
        share(gained("found_chunks"), asked),
        f"{gained('loaded_bytes') / duration_s / 1e9:.2f}",
        f"{gained('stored_bytes') / duration_s / 1e9:.2f}",
        format_bytes(sum(queues)) if queues else "-",
        f"{sum(tier['failures'].values()):,}",
        f"{sum(tier['dropped'].values()):,}",
    ]


def _state(tier: _Status) -> str:
    if "is_drained" not in tier:
        return "ok"
    if tier["is_drained"]:
        return "drained" if tier["is_idle"] else "draining"
    if not tier["is_open"]:
        return "not open"
    suspended = [name for name in ("reads", "stores") if tier[f"{name}_open"]]
    if suspended:
        return f"no {' or '.join(suspended)}"
    if tier["is_slow"]:
        return "slow"
    return "full, only reused" if tier["is_selective"] else "ok"


def _used(tier: _Status, pool: _Status) -> str:
    if "is_drained" not in tier:
        return share(pool["slots"] - pool["free"], pool["slots"])
    used_bytes, capacity_bytes = tier.get("used_bytes"), tier.get("capacity_bytes")
    if used_bytes is None:
        return "-"
    full = f", {share(used_bytes, capacity_bytes)}" if capacity_bytes else ""
    return f"{format_bytes(used_bytes)}{full}"


def _notes(now: _Status) -> Iterator[str]:
    """Yield notes on the time saved by hits, on each tier's disk, and on the last errors."""
    tiers = [now["host"], *now["tiers"]]
    tokens = {tier["name"]: sum(tier["saved_tokens"].values()) for tier in tiers}
    if whole := sum(tokens.values()):
        saved_s = sum(sum(tier["saved_prefill_s"].values()) for tier in tiers)
        time = f"{format_seconds(saved_s)} of computing" if saved_s else "the time is not known yet"
        shares = ", ".join(f"{name} {share(saved, whole)}" for name, saved in tokens.items())
        yield f"saved: {whole:,} tokens, {time}: {shares}"
    for tier in tiers:
        for option, (was, value) in tier["options"].items():
            if was != value:
                now_and_was = f"{in_words(option, value)}, configured: {in_words(option, was)}"
                yield f"{tier['name']}: {option} is {now_and_was}"
    for tier in now["tiers"]:
        if tier.get("free_bytes") is not None:
            names = ("used_chunks", "used_bytes", "capacity_bytes", "free_bytes")
            yield f"{tier['name']}: {contents_in_words(Usage(*map(tier.get, names)))}"
        if tier["compress_s"] and tier["stored_bytes"]:
            smaller = share(tier["stored_object_bytes"], tier["stored_bytes"])
            yield f"{tier['name']}: compressed to {smaller}"
    for tier in now["tiers"]:
        if tier["errors"]:
            age = format_seconds(round(tier["error_age_s"]))
            yield f"last error, {age} ago: {tier['errors'][-1]}"
