"""The main program of a tier's process, which the engine's ``ChildProcess`` starts."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.secrets import MaskingFormatter
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner.jobs import Report
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import FAILED_CLOSE_S, run_until
from kvtier_sdk.runner.process.bootstrap import read_bootstrap, write_error
from kvtier_sdk.runner.process.messages import (
    READ_BYTES,
    Channel,
    Kind,
    MessageSplitter,
    message,
    plain_message,
    read_job,
    read_plain,
    write_event,
    write_reports,
)

_STDERR = 2
#: Added to the process's niceness, so that the engine goes first on a busy machine.
_NICENESS = 5
#: Time limits after the engine has ended: for closing the tier, and for ending this process.
_ORPHAN_CLOSE_S = 0.5
_ORPHAN_END_S = 5.0
_LAST_REPORTS_S = 1.0


class Child:
    def __init__(
        self, name: str, control: socket.socket, data: socket.socket, clock: SystemClock
    ) -> None:
        self._control = control
        self._data = Channel(data)
        self._clock = clock
        self._event_loop = clock.new_event_loop()
        self._thread_id = threading.get_ident()
        self._log = TierLog(name, clock)
        self._splitter = MessageSplitter()
        self._writing = threading.Lock()  # any thread may write log lines to the control socket
        self._reports: deque[Report] = deque()
        self._sending = False
        self._tier_loop: TierLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references
        self._ending = False

    def serve(self) -> NoReturn:
        """Serve until the engine closes the tier or dies; then end the process."""
        asyncio.set_event_loop(self._event_loop)
        self._event_loop.add_reader(self._control, self._read_control)
        run_until(self._event_loop, lambda: False, self._log)
        _exit()

    def _read_control(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._control.recv(READ_BYTES, socket.MSG_DONTWAIT)
        if not data:  # the engine is gone
            self._event_loop.remove_reader(self._control)
            self._end(_ORPHAN_CLOSE_S)
        for kind, body in self._splitter.split(data):
            self._take(kind, body)

    def _take(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.BOOTSTRAP:
            self._opening = self._spawn(self._open(read_plain(body)), "open")
        elif kind is Kind.DRAIN:
            self._spawn(self._drain(read_plain(body)), "drain")
        elif kind is Kind.CLOSE:
            self._end(read_plain(body))
        elif kind is Kind.OPTIONS and self._tier_loop is not None:
            self._change(self._tier_loop, read_plain(body))
        elif kind is Kind.PING:
            self._send(message(Kind.PING))

    def _change(self, tier_loop: TierLoop, options: Mapping[str, Any]) -> None:
        spec = tier_loop.spec
        try:
            changed = spec.changed(options, Place(f"tier {spec.name!r}"))
        except ConfigError as error:
            self._log.warning("its process keeps the options that it has: %s", error)
            return
        spec.set_live(changed)
        tier_loop.options_changed()

    def _send(self, data: bytes) -> None:
        """Write to the control socket. Any thread may call this, even if the engine is gone."""
        with self._writing, contextlib.suppress(OSError):
            self._control.sendall(data)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._clock.spawn(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self, bootstrap: Mapping[str, Any]) -> None:
        try:
            self._tier_loop = self._build(bootstrap)
            is_open = await self._tier_loop.open()
        except BaseException as error:  # a panic in a Rust client is not an Exception
            self._end(FAILED_CLOSE_S, error)
        else:
            # Exempt all objects built so far from garbage collection, because they stay.
            gc.freeze()
            self._event_loop.add_reader(self._data, self._take_jobs, self._tier_loop)
            self._send(plain_message(Kind.OPENED, is_open))

    def _build(self, bootstrap: Mapping[str, Any]) -> TierLoop:
        name = bootstrap["name"]
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_bytes(f"kvtier:{name}".encode()[:15])
        sender = _LogSender(self._log.logger.name, self._send)
        logging.getLogger().addHandler(sender)
        self._log.logger.setLevel(bootstrap["log_level"])
        spec, namespace, layout = read_bootstrap(bootstrap)
        # Mask the lines of other loggers too, because asyncio or a client library may log secrets.
        sender.setFormatter(MaskingFormatter(secrets=secrets_of(spec.config)))
        # Skip the prefault, because the pages already exist and touching them all is slow.
        pool = HostPool.attach(bootstrap["pool_fd"], layout, prefault=False)
        os.close(bootstrap["pool_fd"])
        return TierLoop(
            spec,
            namespace=namespace,
            memory=pool,
            clock=self._clock,
            report=self._take_report,
            announce=lambda event: self._send(message(Kind.INVENTORY, write_event(event))),
            # Ask the engine to kill this process, because this frees the slots of hanging calls.
            give_up=lambda: self._send(message(Kind.HUNG)),
        )

    async def _drain(self, timeout_s: float) -> None:
        ended = self._tier_loop is None or await self._tier_loop.drain(timeout_s)
        self._send_reports()
        self._send(plain_message(Kind.DRAIN, ended))

    def _end(self, timeout_s: float, error: BaseException | None = None) -> None:
        if not self._ending:
            self._ending = True
            self._spawn(self._close(timeout_s, error), "close")

    async def _close(self, timeout_s: float, error: BaseException | None) -> None:
        try:
            async with self._clock.timeout(timeout_s):
                if self._opening is not None and not self._opening.done():
                    self._opening.cancel()
                    await asyncio.wait([self._opening])
                if self._tier_loop is not None:
                    await self._tier_loop.close()
        except TimeoutError:
            self._log.debug("the tier did not close within %g s", timeout_s)
        except Exception:
            self._log.exception("closing the tier failed")
        finally:
            try:
                if error is not None:
                    self._send(plain_message(Kind.REFUSED, write_error(error)))
                self._send_reports()
                self._data.finish(_LAST_REPORTS_S)
            finally:
                # Exit even if sending failed, because the engine waits for a message or the exit.
                _exit()

    def _take_jobs(self, tier_loop: TierLoop) -> None:
        jobs = []
        for kind, body in self._data.read():
            if kind is Kind.LOG:
                tier_loop.log_end(*read_plain(body))
            else:
                jobs.append(read_job(body))
        if jobs:
            tier_loop.submit(jobs)
        if self._data.at_end:
            self._event_loop.remove_reader(self._data)
            self._end(_ORPHAN_CLOSE_S)

    def _take_report(self, report: Report) -> None:
        """Queue a report for the engine. Any thread may call this."""
        self._reports.append(report)
        if self._sending:
            return
        self._sending = True
        # Collect the reports of one iteration of the loop, and send them in the next.
        if threading.get_ident() == self._thread_id:
            self._event_loop.call_soon(self._send_reports)
        else:
            self._event_loop.call_soon_threadsafe(self._send_reports)

    def _send_reports(self) -> None:
        self._sending = False
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        if reports:
            self._data.send(message(Kind.REPORTS, write_reports(reports)), self._event_loop)


class _LogSender(logging.Handler):
    def __init__(self, own: str, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self.setFormatter(MaskingFormatter())
        self._own = own
        self._send_message = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.name != self._own:
                text = f"{record.name}: {text}"
            self._send_message(plain_message(Kind.LOG, [record.levelno, text]))
        except Exception:
            self.handleError(record)


def _watch_parent(control: socket.socket) -> None:
    """End this process when the engine ends, even if the loop is stuck."""
    # Watch the engine's pidfd too, because a fork of the engine may keep the socket open.
    watched = select.poll()
    watched.register(control, 0)
    with contextlib.suppress(OSError):
        watched.register(os.pidfd_open(os.getppid()), select.POLLIN)
    watched.poll()
    # After the shutdown, a loop that is not stuck reads the end of file and closes the tier.
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RD)
    threading.Event().wait(_ORPHAN_END_S)
    os._exit(1)


def _open_standard_streams() -> None:
    # Replace closed streams. A socket that got a stream's number would get the libraries' output.
    while (taken := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(taken)


def _exit() -> NoReturn:
    """End the process without waiting for hanging threads or exit handlers."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def main(name: str, control_fd: int, data_fd: int) -> None:
    # Ignore these signals, because the engine must close the tier before this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _open_standard_streams()
    faulthandler.enable(_STDERR)
    os.nice(_NICENESS)
    control, data = socket.socket(fileno=control_fd), socket.socket(fileno=data_fd)
    control.set_inheritable(False)
    data.set_inheritable(False)
    threading.Thread(target=_watch_parent, args=(control,), daemon=True).start()
    Child(name, control, data, SystemClock()).serve()
