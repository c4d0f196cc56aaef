"""``kvtier replay``: plays a workload through the tiers, without an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.replay import chat_workload, read_trace, replay
from kvtier_sdk.cli.replay.bystanders import EvictOthersOption
from kvtier_sdk.cli.replay.page import replay_page
from kvtier_sdk.cli.replay.view import print_report
from kvtier_sdk.cli.replay.workload import common_chunk_bytes, told
from kvtier_sdk.cli.targets import tools_for
from kvtier_sdk.cli.terminal import JsonOption, progress, read_flag
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.units import parse_seconds

#: These options are unset, because a replay must not use the engine's files, socket or port.
_ENGINES_OWN: dict[str, Any] = dict.fromkeys(("trace_dir", "admin_socket", "metrics_port"))


def replay_command(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Play a block-hash trace: JSON lines with 'hash_ids', as published with Mooncake; "
            "or a directory of them, as an engine records them with 'trace_dir'.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Play this many requests: by default 500 generated ones, or the whole trace.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Host pool, policies and tiers, in TOML, JSON or YAML, or the JSON of vLLM's "
            "--kv-transfer-config. The options below win over the file: --slots also over its "
            "'pool_bytes', all --tier together over all its tiers.",
        ),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, show_default="2000", help="Slots of the host pool.")
    ] = None,
    chunk_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default="an engine's trace says it; 64KiB without --trace",
            help="Size of a chunk, for example 64KiB.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default="returns", help="Eviction policy of the host pool."
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A secondary tier, for example 'file:///data/kv?capacity=1GiB' or 'memory:'; "
            "repeat it for more tiers, which are searched in this order.",
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time in which your engine computes a chunk, for example 40ms: the report says "
            "how much time the hits have saved. As in an engine, a slower load is a miss.",
        ),
    ] = None,
    told_error: Annotated[
        float | None,
        typer.Option(
            "--told",
            min=0,
            metavar="ERROR",
            help="For a trace with sessions: tell the policy when each session's next request "
            "comes, wrong by a factor e^x, where x is normally distributed with this standard "
            "deviation. --told 0 tells the truth.",
        ),
    ] = None,
    evict_others: EvictOthersOption = False,
    as_json: JsonOption = False,
    report_file: Annotated[
        typer.FileTextWrite | None,
        typer.Option(
            "--report",
            metavar="FILE",
            lazy=False,
            help="Write the JSON object into this file too; into a file named .html, a page with "
            "charts.",
        ),
    ] = None,
) -> None:
    """Play a workload through the tiers, without an engine but with real bytes.

    Each chunk's content is computed from its key, and is compared whenever the chunk is loaded.
    Requests run one at a time, and wait where an engine would skip a chunk, so hit rates are exact.
    The exit status is 0 if all is well, 1 if a byte was wrong or a tier does not open, 2 if the
    configuration, an option or the trace is wrong, 3 after an unexpected error.
    """
    if trace is None:
        played = chat_workload(requests or 500, seed=0)
    else:
        played = read_trace(trace)[:requests]
    if told_error is not None:
        played = told(played, told_error, seed=0)
    flags = {"slots": slots, "chunk_bytes": chunk_bytes, "policy": policy, "tiers": tier or None}
    given = {name: value for name, value in flags.items() if value is not None}
    defaults = {"slots": 2000, "chunk_bytes": common_chunk_bytes(played)}
    options = _configuration(config, given, defaults)
    if recompute is not None:
        computed_s = read_flag("--recompute", parse_seconds, recompute)
        options = options.model_copy(update={"recompute_s": computed_s})
    if options.chunk_bytes is None:
        raise ConfigError(
            f"--trace {trace}: it does not say how large a chunk is; give --chunk-bytes, which the "
            "engine's log names at its start"
        )
    with progress("replay", len(played)) as advance:
        report = replay(
            played, options, evict_others=evict_others, on_progress=lambda _: advance(1)
        )
    written = json.dumps(report.as_json()) + "\n"
    if as_json:
        print(written, end="")
    else:
        print_report(report)
    if report_file is not None:
        if report_file.name.endswith(".html"):
            name = "generated chats" if trace is None else trace.name
            written = replay_page(report, name, json.dumps(options.to_dict(), indent=2))
        report_file.write(written)
    if report.wrong_bytes:
        raise typer.Exit(1)


def _configuration(
    file: Path | None, flags: Mapping[str, Any], defaults: dict[str, Any]
) -> TieringConfig:
    """Return the configuration from the file and the flags; a flag overrides the file."""
    given = TieringConfig.from_dict({**defaults, **flags}, where="command line")
    if file is None:
        return given
    options = read_options(file)
    if engine := tools_for(options, where=str(file)):
        config = engine.read(options, where=str(file))
        # An engine's configuration lacks the chunk size, which a flag or the workload provides.
        over = {name: getattr(given, name) for name in {"chunk_bytes", *flags}}
        if "slots" in flags:
            over["pool_bytes"] = None
        return config.model_copy(update=_ENGINES_OWN | over)
    if "pool_bytes" in options and "slots" not in flags:
        del defaults["slots"]
    merged = {**defaults, **options, **flags}
    if "slots" in flags:
        merged.pop("pool_bytes", None)
    return TieringConfig.from_dict(merged, where=str(file)).model_copy(update=_ENGINES_OWN)
