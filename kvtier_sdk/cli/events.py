"""``kvtier events``: what has happened in an engine."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.cli.terminal import read_flag, say
from kvtier_sdk.config.tiering_config import place_of_socket
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.operator.history import history_beside, read_events
from kvtier_sdk.options.units import parse_seconds


def events_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOCKET|FILE",
            parser=place_of_socket,
            help="The engine's admin socket, even if the engine has ended; or the file beside it.",
        ),
    ],
    since: Annotated[
        str, typer.Option(metavar="DURATION", help="How far to look back, such as 1h or 2d.")
    ] = "1h",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as a line of JSON.")
    ] = False,
) -> None:
    """Show what has happened in an engine: outages, lost chunks, drains, purges, restarts."""
    since_s = read_flag("--since", parse_seconds, since)
    path = source if source.is_file() else history_beside(source)
    try:
        events = list(read_events(path, SystemClock().wall_s() - since_s))
    except OSError as error:
        raise ConfigError(f"no history of an engine: {path}: {error.strerror}") from None
    for event in events:
        if as_json:
            print(json.dumps(event))
        else:
            say(f"{datetime.fromtimestamp(event['time']):%Y-%m-%d %H:%M:%S}  {event['text']}")
    if not events and not as_json:
        say(f"nothing has happened in the last {since}")
