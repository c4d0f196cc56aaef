"""``kvtier set``: changes options of a running engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.backends import written_default
from kvtier_sdk.cli.engine import Socket, ask_engine
from kvtier_sdk.cli.option_table import OptionInfo, describe_options
from kvtier_sdk.cli.terminal import print_columns, read_settings, say
from kvtier_sdk.config.tiering_config import PoolOptions
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.options.tier import BoundedTierConfig, RunnerOptions


@cache
def _live_options() -> dict[str, OptionInfo]:
    models = RunnerOptions, BoundedTierConfig, PoolOptions
    described = [option for model in models for option in describe_options(model)]
    return {option.name: option for option in described if option.is_live}


def in_words(option: str, value: Any) -> str:
    known = _live_options().get(option)
    return str(value) if known is None else written_default(replace(known, default=value))


def set_command(
    socket: Socket,
    tier: Annotated[
        str, typer.Argument(metavar="TIER", help=f"The tier's name; '{PRIMARY}' is the host pool.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTION=VALUE...",
            help="As in the configuration, such as capacity=200GiB or load_deadline=2s; 'none' "
            "takes a limit away. All are changed, or none. Without any, the values are shown; "
            "'kvtier backends' calls live what may change.",
        ),
    ] = None,
) -> None:
    """Change options of a running engine, until it restarts.

    The engine's log and 'kvtier events' record each change and its author.
    """
    given = read_settings(settings or ())
    changes = {option: None if value == "none" else value for option, value in given.items()}
    answer = ask_engine(socket, command="set", tier=tier, options=changes)
    options = answer["options"]
    rows = []
    for option in changes or options:
        configured, value = options[option]
        note = "" if configured == value else f"configured: {in_words(option, configured)}"
        rows.append([option, in_words(option, value), note])
    print_columns(rows)
    if any(configured != value for configured, value in options.values()):
        say("A restart returns to the configuration: write there what should stay.")
