"""The services of an engine for its operator: trace, history, admin socket, metrics endpoint."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import Any

from kvtier_sdk.admin import AdminSocket, Answer, make_directory
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tiering_config import TieringConfig, read_tiers
from kvtier_sdk.event_publisher import EventPublisher
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.exporter import serve_metrics
from kvtier_sdk.hints import Hint, Verb
from kvtier_sdk.metrics import Sample, TierStats
from kvtier_sdk.operator.history import EventHistory
from kvtier_sdk.options.place import Place, nearest
from kvtier_sdk.options.secrets import masked
from kvtier_sdk.options.tier import BoundedTierConfig
from kvtier_sdk.tiering.hint_executor import OperatorHint
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.slots import Purge
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.trace import TraceRecorder

_log = logging.getLogger("kvtier.admin")

_COMMANDS = ("status", "set", "purge", "drain", "resume", "hint", "receipt", "losses")
_VERBS = {"pin": Verb.PIN, "prefetch": Verb.PREFETCH, "forget": Verb.END}
_MOST_HINTS = 64


class OperatorServices:
    """The services that a configuration enables for an engine.

    The services stay open if the engine closes its manager and opens another. If configured,
    ``recorder`` records finished requests, and ``publisher`` announces chunks. ``rank``, the
    engine's data-parallel rank, is added to the events' ports.
    """

    def __init__(
        self, config: TieringConfig, clock: Clock, chunk_bytes: int, *, rank: int = 0
    ) -> None:
        self._config = config
        self._clock = clock
        self._manager: TieringManager  # set by :meth:`attend`, before any request arrives
        self._fingerprints: Set[str] = frozenset()
        self._is_serving = False
        self._started_s = 0.0
        self._purge: Purge | None = None
        self._hints: dict[int, OperatorHint] = {}
        self._numbers = count(1)
        self.recorder: TraceRecorder | None = None
        self._history: EventHistory | None = None
        self.publisher: EventPublisher | None = None
        with ExitStack() as stack:
            if config.trace_dir is not None:
                self.recorder = TraceRecorder(
                    Path(config.trace_dir),
                    file_bytes=config.trace_file_bytes,
                    files=config.trace_files,
                    chunk_bytes=chunk_bytes,
                    clock=clock,
                )
                stack.callback(self.recorder.close)
            if config.admin_socket is not None:
                place = Path(config.admin_socket)
                make_directory(place)
                self._history = EventHistory(place, chunk_bytes, clock)
                stack.callback(self._history.close)
            if config.events_endpoint is not None:
                tokens = config.events_tokens
                self.publisher = EventPublisher(config, clock, rank=rank, tokens=tokens)
                stack.callback(self.publisher.close)
            self._stack = stack.pop_all()

    def attend(self, manager: TieringManager, fingerprints: Set[str]) -> None:
        """Serve an open manager, whose tiers' namespaces have these fingerprints."""
        if self._history is not None:
            self._history.attend(manager)
        self._manager, self._fingerprints = manager, fingerprints
        if self._is_serving:
            return
        self._is_serving, self._started_s = True, self._clock.now_s()
        serving = _serving(self._config, lambda: self._manager.samples(), self._answer)
        path = self._stack.enter_context(serving)
        if path is not None:
            _log.info("admin socket: %s", path)

    def close(self) -> None:
        """End all services; a second call does nothing."""
        self._stack.close()

    # --- admin requests, answered without waiting for the engine's thread -----------------------

    def _answer(self, request: Mapping[str, Any], caller: str) -> dict[str, Any]:
        command = str(request.get("command"))
        if command == "status":
            return self._status()
        if command == "purge":
            return self._begin_purge(request.get("namespaces"), caller)
        if command == "hint":
            return self._give_hint(request)
        if command == "receipt":
            return self._receipt(request.get("number"))
        if command not in _COMMANDS:
            return {"error": f"no command {command!r}; {nearest(command, _COMMANDS, 'allowed')}"}
        name = str(request.get("tier"))
        clients = {client.spec.name: client for client in self._manager.clients}
        if command == "set" and name in (PRIMARY, *clients):
            return self._set(clients.get(name), request.get("options"), caller)
        if name not in clients:
            return {"error": f"no tier {name!r}; {nearest(name, clients, 'there are')}"}
        if command == "losses":
            return self._losses(clients[name], request)
        clients[name].is_drained = command == "drain"
        done = "taken out" if command == "drain" else "put back"
        _log.warning("%s: the tier is %s by %s", name, done, caller)
        return self._tier(clients[name])

    def _set(self, client: TierClient | None, given: object, caller: str) -> dict[str, Any]:
        """Change all ``given`` live options, or none if one is wrong; return all live options."""
        place = Place(PRIMARY if client is None else client.spec.name)
        options: Any = self._config if client is None else client.spec
        changed = options.changed(place.table(given), place)
        if client is not None:
            if isinstance(changed.config, BoundedTierConfig):
                changed.config.check_capacity(sum(changed.object_lengths(client.chunk_bytes)))
            tiers = [changed if one is client else one.spec for one in self._manager.clients]
            read_tiers(Place("engine").at("tiers").entries(tiers))
        for name, (was, now) in options.set_live(changed).items():
            text = "%s: %s was %s and is %s now, set by %s"
            _log.warning(text, place.where, name, masked(name, was), masked(name, now), caller)
        if client is not None:
            client.options_changed()
        else:
            share = changed.hint_share(self._manager.stats[0].capacity_bytes or 0)
            self._manager.limit_hints(share, changed.hint_duration_s)
        return {"options": options.live_values()}

    def _begin_purge(self, fingerprints: object, caller: str) -> dict[str, Any]:
        is_meant = isinstance(fingerprints, list) and any(
            str(one) in self._fingerprints for one in fingerprints
        )
        if is_meant:
            self._purge = self._manager.purge_pool()
            _log.warning("the host pool is emptied by %s", caller)
        return self._status() | {"is_meant": is_meant}

    def _losses(self, client: TierClient, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return why the tier lacks each absent key; ``None`` for keys of another namespace."""
        keys = map(bytes.fromhex, request.get("keys", ()))
        is_ours = request.get("namespace") in self._fingerprints
        return {"losses": [client.losses.find(key) if is_ours else None for key in keys]}

    def _give_hint(self, request: Mapping[str, Any]) -> dict[str, Any]:
        verb = _VERBS.get(str(request.get("verb")))
        duration_s = request.get("duration_s")
        if verb is None:
            return {"error": f"no hint {request.get('verb')!r}; allowed: {', '.join(_VERBS)}"}
        if verb is Verb.PIN and not (
            isinstance(duration_s, int | float) and 0 <= duration_s < math.inf
        ):
            return {"error": "'duration_s' should be a number of seconds"}
        names = str(request.get("session")), str(request.get("tenant", ""))
        number = next(self._numbers)
        asked = self._hints[number] = OperatorHint(Hint(verb, duration_s), *names)
        self._hints.pop(number - _MOST_HINTS, None)
        self._manager.give_hint(asked)
        return {"number": number}

    def _receipt(self, number: object) -> dict[str, Any]:
        asked = self._hints.get(number) if isinstance(number, int) else None
        if asked is None:
            return {"error": f"no hint has the number {number!r}"}
        found = asked.receipt
        return {
            "outcome": None if found is None else found.outcome.value,
            "text": None if found is None else str(found),
            "idle_s": max(0.0, self._clock.now_s() - self._manager.last_step_s),
        }

    def _status(self) -> dict[str, Any]:
        manager, now_s = self._manager, self._clock.now_s()
        trace = purge = None
        if self.recorder is not None:
            trace = {
                "file": str(self.recorder.path),
                "written_requests": self.recorder.written,
                "dropped_requests": self.recorder.dropped,
            }
        if self._purge is not None:
            left = self._purge.left
            purge = {
                "forgotten_chunks": self._purge.forgotten,
                "chunks_in_use": None if left is None else len(left),
            }
        return {
            "pid": os.getpid(),
            "uptime_s": now_s - self._started_s,
            # The age of the following counts, which change only in the engine's steps.
            "idle_s": max(0.0, now_s - manager.last_step_s),
            "pool": asdict(manager.usage()),
            "trace": trace,
            "purge": purge,
            "host": _counters(manager.stats[0]) | {"options": self._config.live_values()},
            "tiers": [self._tier(client) for client in manager.clients],
        }

    def _tier(self, client: TierClient) -> dict[str, Any]:
        counters = _counters(client.stats_now())
        return counters | {
            "error_age_s": max(0.0, self._clock.now_s() - counters.pop("error_s")),
            "is_drained": client.is_drained,
            "options": client.spec.live_values(),
            "is_idle": client.is_idle,
            "jobs": client.jobs.unreleased,
            "load_queue_bytes": client.load_bytes,
            "store_queue_bytes": client.store_bytes,
            "max_queue_bytes": client.spec.runner.max_queue_bytes,
        }


def check_services(config: TieringConfig) -> None:
    """Open and close the services of ``config``, to find errors before the engine loads a model.

    Raises:
        ConfigError: a port or socket is not available; the message names the process that uses it.
    """
    with _serving(config, list, lambda request, caller: {}):
        pass


@contextmanager
def _serving(
    config: TieringConfig, samples: Callable[[], Iterable[Sample]], answer: Answer
) -> Iterator[Path | None]:
    """Serve metrics and admin requests if configured; yield the admin socket's path or ``None``."""
    path = None
    with ExitStack() as stack:
        if (port := config.metrics_port) is not None:
            stack.enter_context(serve_metrics(samples, port=port, host=config.metrics_host))
        if config.admin_socket is not None:
            place = Path(config.admin_socket)
            make_directory(place)
            path = stack.enter_context(AdminSocket(place, answer)).path
        yield path


def _counters(stats: TierStats) -> dict[str, Any]:
    """Return the fields that are numbers, strings, ``None``, lists, or dicts of numbers."""
    found: dict[str, Any] = {}
    for of in fields(stats):
        value = getattr(stats, of.name)
        if isinstance(value, dict):
            # Copy the table in one call, because the engine's thread may change it at any time.
            table = dict(value)
            if all(isinstance(number, int | float) for number in table.values()):
                found[of.name] = table
        elif value is None or isinstance(value, int | float | str | list):
            found[of.name] = value
    return found
