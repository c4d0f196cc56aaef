"""``kvtier drain`` and ``kvtier resume``, and questions to a running engine."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_sdk.admin import ask
from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.cli.flags import read_flag
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.units import parse_seconds

_LOOK_S = 0.2

Socket = Annotated[
    Path,
    typer.Argument(metavar="SOCKET", help="The engine's admin socket: its option 'admin_socket'."),
]
_Tier = Annotated[str, typer.Argument(metavar="TIER", help="The tier's name.")]


def ask_engine(socket: Path, **request: Any) -> dict[str, Any]:
    """Ask an engine; one that does not answer is a line on stderr and status 1."""
    try:
        answer = ask(socket, request)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"kvtier: no engine answers at {socket}: {reason}", file=sys.stderr)
        raise typer.Exit(1) from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def wait(duration_s: float) -> None:
    """Let time pass."""
    threading.Event().wait(duration_s)


def drain_command(
    socket: Socket,
    tier: _Tier,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for what is under way.")
    ] = "30s",
) -> None:
    """Take a tier out of a running engine, and wait until nothing of it is under way.

    The engine asks it nothing and gives it nothing until 'kvtier resume'. The exit status is 1 if
    something is still under way after the timeout; the tier is out all the same.
    """
    timeout_s = read_flag("--timeout", parse_seconds, timeout)
    clock = SystemClock()
    began_s = clock.now_s()
    ask_engine(socket, command="drain", tier=tier)
    while True:
        # The step that runs meanwhile may still begin something.
        wait(_LOOK_S)
        (found,) = (t for t in ask_engine(socket, command="status")["tiers"] if t["name"] == tier)
        waited_s = clock.now_s() - began_s
        if found["is_idle"]:
            print(f"{tier} is out; nothing of it is under way after {waited_s:.1f} s")
            return
        if waited_s >= timeout_s:
            print(f"{tier} is out; after {waited_s:.1f} s {found['jobs']} jobs are under way")
            raise typer.Exit(1)


def resume_command(socket: Socket, tier: _Tier) -> None:
    """Put a tier back that was taken out of a running engine."""
    found = ask_engine(socket, command="resume", tier=tier)
    suspended = [
        name for name, field in (("reads", "reads_open"), ("stores", "stores_open")) if found[field]
    ]
    note = f"; its breaker suspends {' and '.join(suspended)}" if suspended else ""
    print(f"{tier} is in{note}")
