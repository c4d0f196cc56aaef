"""Commands for one engine: events, set, drain, resume, pin, prefetch and forget."""

from __future__ import annotations

import json
import socket as sockets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_sdk.admin import server_of
from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.cli.backends import written_default
from kvtier_sdk.cli.option_table import OptionInfo, describe_options
from kvtier_sdk.cli.terminal import print_columns, read_flag, read_settings, say
from kvtier_sdk.config.tiering_config import PoolOptions, TieringConfig, place_of_socket
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.operator.history import history_beside, read_events
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.tier import BoundedTierConfig, RunnerOptions
from kvtier_sdk.options.units import parse_seconds

_MOST_ANSWER_BYTES = 16 * 1024 * 1024
_LOOK_S = 0.2
#: An engine without a step for this long counts as idle.
_STEP_S = 1.0
_IN_USE_S = 10.0
_RECEIPT_S = 60.0

Socket = Annotated[
    Path,
    typer.Argument(
        metavar="SOCKET",
        parser=place_of_socket,
        help="The engine's option 'admin_socket'; 'auto' if that is so.",
    ),
]
_Tier = Annotated[str, typer.Argument(metavar="TIER", help="The tier's name.")]
_Session = Annotated[
    str,
    typer.Argument(
        metavar="SESSION",
        help="The session that an earlier request has named in its hints; see the page on agents.",
    ),
]
_Tenant = Annotated[
    str, typer.Option(metavar="NAME", help="The tenant that the request has named, if any.")
]


def socket_at(path: Path) -> Path:
    """Return the socket at a path. For a directory, return the socket of its only engine."""
    found = []
    for one in sorted(path.glob("kvtier-*.sock")):
        with suppress(OSError):
            if server_of(one) is not None:
                found.append(one)
    if len(found) > 1:
        raise ConfigError(f"several engines run; name one of {', '.join(map(str, found))}")
    return found[0] if found else path


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Send a request and return the answer; raise :class:`OSError` if there is no answer."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.settimeout(timeout_s)
        client.connect(str(path))
        client.sendall(json.dumps(request).encode() + b"\n")
        with client.makefile("rb") as answers:
            line = answers.readline(_MOST_ANSWER_BYTES)
    if not line:
        raise ConnectionResetError("the engine has closed the connection")
    answer: dict[str, Any] = json.loads(line)
    return answer


def ask_engine(socket: Path, **request: Any) -> dict[str, Any]:
    """Return an engine's answer. If the engine does not answer, end the command with status 1."""
    socket = socket_at(socket)
    try:
        answer = ask(socket, request)
    except OSError as error:
        reason = error.strerror or str(error)
        say(f"kvtier: no engine answers at {socket}: {reason}", to_stderr=True)
        raise typer.Exit(1) from None
    if "error" in answer:
        raise ConfigError("\n".join(map(one_line, str(answer["error"]).split("\n"))))
    return answer


def sockets_of(config: TieringConfig) -> list[Path]:
    if config.admin_socket is None:
        return []
    path = Path(config.admin_socket)
    return sorted(path.glob("kvtier-*.sock")) if path.is_dir() else [path]


def purge_pools(
    config: TieringConfig, namespaces: Collection[str], before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Purge the engines' host pools. The counts include those of ``before``, an earlier purge."""
    forgotten = {one["socket"]: one.get("forgotten_chunks", 0) for one in before}
    purged = [{"socket": str(one)} | _purge_pool(one, namespaces) for one in sockets_of(config)]
    for one in purged:
        if "forgotten_chunks" in one:
            one["forgotten_chunks"] += forgotten.get(one["socket"], 0)
    return purged


def _purge_pool(socket: Path, namespaces: Collection[str]) -> dict[str, Any]:
    try:
        answer = ask(socket, {"command": "purge", "namespaces": list(namespaces)})
        if not answer["is_meant"]:
            return {"fault": "its engine has another namespace, and keeps its pool"}
        for waited_s in _looks():
            status = ask(socket, {"command": "status"})
            found: dict[str, Any] = status["purge"] or {}
            if not found:
                return {"fault": "the engine has restarted, with an empty pool"}
            sleeps = found["chunks_in_use"] is None and status["idle_s"] > _STEP_S
            if sleeps or found["chunks_in_use"] == 0 or waited_s > _IN_USE_S:
                break
        return found
    except (OSError, ValueError, LookupError) as error:
        return {"fault": f"no engine answers: {getattr(error, 'strerror', None) or error!r}"}


def tell_purge(config: TieringConfig, purged: list[dict[str, Any]]) -> Iterator[str]:
    if not purged:
        where = config.admin_socket
        why = "there is no 'admin_socket'" if where is None else f"there is none at {where}"
        yield f"no engine was asked, since {why}: pools may still serve these"
    for engine in purged:
        if "fault" in engine:
            yield f"{engine['socket']}: {engine['fault']}"
            continue
        in_use = engine["chunks_in_use"]
        if in_use is None:
            yield f"{engine['socket']}: the engine is idle; it will forget before its next lookup"
        else:
            rest = f"; {in_use:,} in use will be, when they no longer are" if in_use else ""
            yield f"{engine['socket']}: {engine['forgotten_chunks']:,} chunks forgotten{rest}"
    if not purged or any("fault" not in engine for engine in purged):
        yield (
            "an engine's device may still serve them, and store them again: reset its prefix cache "
            "(vLLM: POST /reset_prefix_cache, in development mode), or restart it"
        )


def wait(duration_s: float) -> None:
    threading.Event().wait(duration_s)


def _looks() -> Iterator[float]:
    """Pause repeatedly; after each pause, yield the seconds since the start."""
    clock = SystemClock()
    began_s = clock.now_s()
    while True:
        wait(_LOOK_S)
        yield clock.now_s() - began_s


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
    """Change options of a running engine; the changes last until the engine restarts.

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


def drain_command(
    socket: Socket,
    tier: _Tier,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for what is under way.")
    ] = "30s",
) -> None:
    """Take a tier out of a running engine, and wait until the tier's jobs have ended.

    The engine sends the tier no lookups, loads or stores until 'kvtier resume'. The exit status is
    1 if jobs still run after the timeout; the tier stays out even then.
    """
    timeout_s = read_flag("--timeout", parse_seconds, timeout, may_be_0=True)
    ask_engine(socket, command="drain", tier=tier)
    # Begin with a pause, because the engine's current step can still start jobs.
    for waited_s in _looks():
        (found,) = (t for t in ask_engine(socket, command="status")["tiers"] if t["name"] == tier)
        if found["is_idle"]:
            say(f"{tier} is out; nothing of it is under way after {waited_s:.1f} s")
            return
        if waited_s >= timeout_s:
            say(f"{tier} is out; after {waited_s:.1f} s {found['jobs']} jobs are under way")
            raise typer.Exit(1)


def resume_command(socket: Socket, tier: _Tier) -> None:
    """Put a drained tier back into a running engine."""
    found = ask_engine(socket, command="resume", tier=tier)
    suspended = [name for name in ("reads", "stores") if found[f"{name}_open"]]
    note = f"; its breaker suspends {' and '.join(suspended)}" if suspended else ""
    say(f"{tier} is in{note}")


def pin_command(
    socket: Socket,
    session: _Session,
    duration: Annotated[
        str,
        typer.Option(
            "--for", metavar="DURATION", help="How long; each use renews it. 0s ends a pin."
        ),
    ] = "1h",
    tenant: _Tenant = "",
) -> None:
    """Keep a session's chunks, such as its system prompt, in a running engine's host pool.

    Pins use the engine's 'hint_budget', and last at most as long as its 'hint_duration'.
    """
    duration_s = read_flag("--for", parse_seconds, duration, may_be_0=True)
    _give_hint(socket, verb="pin", session=session, tenant=tenant, duration_s=duration_s)


def prefetch_command(socket: Socket, session: _Session, tenant: _Tenant = "") -> None:
    """Load a session's chunks from the tiers into a running engine's host pool.

    Loads for requests come first. An idle engine loads the chunks in its next step.
    """
    _give_hint(socket, verb="prefetch", session=session, tenant=tenant)


def forget_command(socket: Socket, session: _Session, tenant: _Tenant = "") -> None:
    """End a session's pins, and drop from the host pool its chunks that no other session uses."""
    _give_hint(socket, verb="forget", session=session, tenant=tenant)


def _give_hint(socket: Path, **hint: Any) -> None:
    """Send a hint to a running engine, and print the receipt; exit with 1 after a refusal."""
    number = ask_engine(socket, command="hint", **hint)["number"]
    for waited_s in _looks():
        found = ask_engine(socket, command="receipt", number=number)
        if found["outcome"] not in (None, "deferred") or waited_s > _RECEIPT_S:
            break
        if found["outcome"] is None and found["idle_s"] > _STEP_S:
            say("the engine is idle; it will do this with its next request")
            return
    say(found["text"] or "the engine has not answered yet")
    if found["outcome"] in (None, "refused", "expired"):
        raise typer.Exit(1)
