"""Queries of /proc, and clocks that pace the engine's supervision of a tier's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier_sdk import SystemClock
from kvtier_sdk.aio.clock import TimerHandle
from kvtier_sdk.runner import ProcessRunner, TierRunner


class HeldBackClock(SystemClock):
    """A clock that records each sleep of at least a second, and ends it only in :meth:`go_on`."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self.ahead_s = 0.0
        self._turns = threading.Semaphore(0)
        self.paused = threading.Event()

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s < 1.0:
            await asyncio.sleep(delay_s)
            return
        self.pauses_s.append(delay_s)
        self.paused.set()
        while not self._turns.acquire(blocking=False):
            await asyncio.sleep(0.002)

    def go_on(self) -> None:
        assert self.paused.wait(30)
        self.paused.clear()
        self._turns.release()


class LookClock(HeldBackClock):
    """A clock that lets the engine ping the process only when a test calls :meth:`look`."""

    def __init__(self) -> None:
        super().__init__()
        self._looks: queue.Queue[tuple[asyncio.AbstractEventLoop, Callable[..., object]]] = (
            queue.Queue()
        )

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        if callback.__name__ != "_ping":
            return super().call_at(when_s, callback, *args)
        self._looks.put((asyncio.get_running_loop(), callback))
        return super().call_at(when_s + 10_000, lambda: None)

    @property
    def looks(self) -> int:
        return self._looks.qsize()

    def look(self) -> None:
        """Let the engine send its next ping now."""
        event_loop, callback = self._looks.get(timeout=30)
        event_loop.call_soon_threadsafe(callback)


def pid_of(runner: TierRunner) -> int:
    assert isinstance(runner, ProcessRunner)
    assert runner.pid is not None
    return runner.pid


def is_there(pid: int) -> bool:
    """Return true if a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children() -> list[int]:
    return list(tier_processes(os.getpid()))


def tier_processes(parent: int) -> dict[int, str]:
    told = {}
    for task in Path(f"/proc/{parent}/task").iterdir():
        children = ""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            children = (task / "children").read_text()
        for child in map(int, children.split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{child}/cmdline").read_text()
                if "kvtier_sdk.runner.process" in command:
                    told[child] = command + Path(f"/proc/{child}/environ").read_text()
                told |= tier_processes(child)
    return told
