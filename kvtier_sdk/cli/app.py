"""The command's options, and what becomes of its errors."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from kvtier_sdk.cli.replay_view import print_json, print_table, progress
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.replay import ReplayOptions, chat_workload, read_trace, replay
from kvtier_sdk.units import parse_bytes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Offloading the KV cache of large language models through tiers of memory and storage.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {version('kvtier-sdk')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")


@app.command("replay")
def replay_command(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Play a block-hash trace: JSON lines with 'hash_ids', as published with Mooncake.",
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(metavar="NAME", help="Without --trace: the workload to generate ('chat')."),
    ] = "chat",
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Play this many requests: by default 500 generated ones, or the whole trace.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the generated workload.")] = 0,
    slots: Annotated[int, typer.Option(min=1, help="Slots of the host pool.")] = 2000,
    chunk_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of a chunk, for example 64KiB.")
    ] = "64KiB",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Eviction policy of the host pool.")
    ] = "lru",
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A secondary tier, for example 'file:///data/kv?capacity=1GiB' or 'memory:'; "
            "repeat it for more, asked in this order.",
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests that overlap. 1 waits where an engine would skip: nothing is dropped "
            "and the hit rate is exact.",
        ),
    ] = 1,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Check digests; switch off for measurements and tests only.",
        ),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout instead of the table.")
    ] = False,
) -> None:
    """Play a workload through the tiers, without an engine but with real bytes.

    Each chunk's content is a function of its key and is compared whenever it comes back. The
    exit status is 1 if a byte was wrong.
    """
    if workload != "chat":
        raise ConfigError(f"--workload {workload!r}: only 'chat' can be generated")
    try:
        size_bytes = parse_bytes(chunk_bytes)
    except ValueError as error:
        raise ConfigError(f"--chunk-bytes: {error}") from None
    played = read_trace(trace)[:requests] if trace else chat_workload(requests or 500, seed)
    options = ReplayOptions(
        slots=slots,
        chunk_bytes=size_bytes,
        tiers=tier or [],
        policy=policy,
        concurrency=concurrency,
        verify=verify,
    )
    with progress(len(played), shown=not as_json) as advance:
        report = replay(played, options, on_progress=advance)
    if as_json:
        print_json(report)
    else:
        print_table(report, options)
    if report.wrong_bytes:
        raise typer.Exit(1)


def run() -> int:
    """Run the command line.

    Returns:
        The exit status: 2 with a line on stderr for what the user can mend.
    """
    try:
        app(standalone_mode=True)
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    return 0
