"""Keeps an engine's events in a file of bounded size, for ``kvtier events``."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.secrets import MaskingFormatter
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.savings import Savings

#: The size at which the file is renamed and a new one begins. One renamed file is kept.
_FILE_BYTES = 4 * 2**20
_MOST_WAITING = 2**10
_WRITE_S = 1.0
#: The number of writes between two sums of lost chunks, and between records of a steady speed.
_SUM, _SPEED = 60, 3600
#: The last day of the year 9999, because Python has no later dates.
_END_S = 253_402_214_400
_LOST = re.compile("kvtier_(evicted|evicted_unread|failed|dropped)_chunks_total")

_log = logging.getLogger("kvtier.history")


def history_beside(socket: Path) -> Path:
    # Drop the process id, because engines with sockets in one directory share a history.
    name = re.sub(r"^kvtier-\d+$", "kvtier", socket.stem) + ".events.jsonl"
    return socket / "kvtier.events.jsonl" if socket.is_dir() else socket.with_name(name)


def read_events(path: Path, since_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the events since a wall-clock time, oldest first."""
    for file in (path.with_name(f"{path.name}.1"), path):
        for line in file.read_bytes().splitlines() if file == path or file.exists() else ():
            # Skip incomplete lines, which a full disk may leave behind.
            with suppress(ValueError, LookupError, TypeError):
                event = json.loads(line)
                if max(0.0, since_s) <= event["time"] < _END_S and isinstance(event["text"], str):
                    yield event


class EventHistory(logging.Handler):
    """Writes kvtier's warnings to a file, and once a minute the numbers of lost chunks."""

    def __init__(self, socket: Path, chunk_bytes: int, clock: Clock) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(MaskingFormatter())
        self.path = history_beside(socket)
        self._chunk_bytes, self._clock = chunk_bytes, clock
        self._manager: TieringManager | None = None
        self._seen: Counter[str] = Counter()
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        self._is_failing = False
        try:
            self._append(b"")
            self._speeds = {
                str(event.get("model")): event["chunk_s"]
                for event in read_events(self.path)
                if event.get("chunk_bytes") == chunk_bytes and type(event.get("chunk_s")) is float
            }
        except OSError as error:
            reason = f"cannot write {self.path}: {error.strerror}"
            raise ConfigError(f"option 'admin_socket': {reason}") from None
        # A separate thread writes the file, so that a slow disk never delays the engine.
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-history", daemon=True)
        self._thread.start()
        logging.getLogger("kvtier").addHandler(self)

    def attend(self, manager: TieringManager) -> None:
        """Record ``manager``'s losses, and restore its model's recorded speed."""
        manager.savings.rate.chunk_s = self._speeds.get(manager.savings.model)
        self._seen, self._manager = Counter(), manager
        tiers = ", ".join(stats.name for stats in manager.stats)
        self._add(f"engine {os.getpid()} offloads to {tiers}")

    def close(self, timeout_s: float = 10.0) -> None:
        logging.getLogger("kvtier").removeHandler(self)
        self._closing.set()
        self._thread.join(timeout_s)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self._add(self.format(record), level=record.levelname)
        # If no other handler exists, print warnings, as Python would without this handler.
        handlers = [*logging.root.handlers, *logging.getLogger("kvtier").handlers]
        if logging.lastResort and all(isinstance(one, EventHistory) for one in handlers):
            logging.lastResort.handle(record)

    def _add(self, text: str, **facts: object) -> None:
        event = {"time": self._clock.wall_s(), "pid": os.getpid(), "text": text}
        self._waiting.append(event | facts)

    def _run(self) -> None:
        for number in count(1):
            is_last = self._closing.wait(_WRITE_S)
            if self._manager is not None:
                if is_last or not number % _SUM:
                    self._sum_up(self._manager)
                self._note_speed(self._manager.savings, is_due=is_last or not number % _SPEED)
            self._write()
            if is_last:
                return

    def _sum_up(self, manager: TieringManager) -> None:
        lost: Counter[str] = Counter()
        for metric, labels, value in manager.samples():
            what = _LOST.fullmatch(metric.name)
            if what is not None and isinstance(value, int):
                lost[" ".join((labels[0], what[1], *labels[1:]))] = value
        # A new manager counts from 0. Counter subtraction drops the resulting negative differences.
        gained, self._seen = lost - self._seen, lost
        if gained:
            text = ", ".join(f"{what} {chunks:,}" for what, chunks in gained.items())
            self._add(f"chunks of a minute: {text}", chunks=gained)

    def _note_speed(self, savings: Savings, *, is_due: bool) -> None:
        chunk_s, noted_s = savings.rate.chunk_s, self._speeds.get(savings.model, 0.0)
        if chunk_s is not None and (is_due or abs(chunk_s - noted_s) > noted_s / 2):
            self._speeds[savings.model] = chunk_s
            facts = {"model": savings.model, "chunk_bytes": self._chunk_bytes}
            self._add(f"a chunk is computed in {1e3 * chunk_s:.3g} ms", chunk_s=chunk_s, **facts)

    def _write(self) -> None:
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        lines = "".join(f"{json.dumps(event)}\n" for event in waiting).encode()
        try:
            if lines:
                # Begin a new line, because a failed write may have left part of a line.
                self._append(b"\n" * self._is_failing + lines)
                self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.error("events are missing from %s: %s", self.path, error.strerror)
            self._is_failing = True

    def _append(self, lines: bytes) -> None:
        with suppress(FileNotFoundError):
            if self.path.stat().st_size + len(lines) > _FILE_BYTES:
                self.path.replace(f"{self.path}.1")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(self.path, flags, 0o600), "ab") as file:
            file.write(lines)
