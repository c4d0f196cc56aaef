"""A tier's process: reads jobs, has a thread runner do them, and writes back what it reports.

Started by :mod:`kvtier_sdk.runner.process.child_process`; not to be run by hand.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.options.secrets import MaskingFormatter
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner.jobs import Report
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.process.bootstrap import read_bootstrap, write_error
from kvtier_sdk.runner.process.codec import (
    Kind,
    MessageSplitter,
    message,
    plain_message,
    read_jobs,
    read_plain,
    write_reports,
)
from kvtier_sdk.runner.thread import ThreadRunner

_STDERR = 2
_READ_BYTES = 1 << 18
#: Where processors are short the engine goes first.
_NICENESS = 5
#: How long the tier may take to end in good order when the engine is gone, and the process.
_ORPHAN_CLOSE_S = 0.5
_ORPHAN_END_S = 5.0


class Child:
    """The tier's side of the socket.

    The main thread only reads: it sees that the engine is gone, or wants an end, whatever the
    tier's thread is stuck in.

    Args:
        link: the socket.
    """

    def __init__(self, link: socket.socket) -> None:
        self._channel = link
        self._writing = threading.Lock()
        self._runner: ThreadRunner | None = None
        self._opening: threading.Thread | None = None
        self._ending = False

    def serve(self) -> None:
        """Do what is asked until the engine says so, or is gone. Ends the process."""
        splitter = MessageSplitter()
        with contextlib.suppress(OSError):
            while data := self._channel.recv(_READ_BYTES):
                for kind, body in splitter.split(data):
                    self._take(kind, body)
        self._end(_ORPHAN_CLOSE_S)

    def send(self, data: bytes) -> None:
        """Write messages. On any thread; an engine that is gone is no error."""
        with self._writing:
            self._send(data)

    def _take(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.BOOTSTRAP:
            self._begin(read_plain(body))
        elif kind is Kind.JOBS and self._runner is not None:
            self._runner.submit(read_jobs(body))
            # A loop that has ended refuses jobs without a notification.
            self._send_reports()
        elif kind is Kind.DRAIN:
            timeout_s = read_plain(body)
            threading.Thread(target=self._drain, args=(timeout_s,), daemon=True).start()
        elif kind is Kind.CLOSE:
            self._end(read_plain(body))

    def _begin(self, order: Mapping[str, Any]) -> None:
        try:
            self._runner = self._build(order)
        except Exception as error:
            self._refuse(error)
        self._opening = threading.Thread(target=self._open, args=(self._runner,), daemon=True)
        self._opening.start()

    def _build(self, order: Mapping[str, Any]) -> ThreadRunner:
        name = order["name"]
        _send_logs(f"kvtier.tier.{name}", order["log_level"], self.send)
        spec, namespace, layout = read_bootstrap(order)
        # Its pages are there already; mapping them takes long for a large pool.
        pool = HostPool.attach(order["pool_fd"], layout, prefault=False)
        os.close(order["pool_fd"])
        clock = SystemClock()

        def make_loop(report: Callable[[Report], None]) -> TierLoop:
            return TierLoop(
                spec,
                namespace=namespace,
                memory=pool,
                clock=clock,
                report=report,
                give_up=self._give_up,
                verify=order["verify"],
            )

        return ThreadRunner(name, make_loop, clock, self._send_reports)

    def _open(self, runner: ThreadRunner) -> None:
        try:
            runner.start()
        except BaseException as error:
            # One that was broken off is no refusal: the main thread is closing the tier.
            if not self._ending:
                self._refuse(error)
        else:
            self.send(message(Kind.OPENED, b""))

    def _refuse(self, error: BaseException) -> None:
        try:
            self.send(plain_message(Kind.REFUSED, write_error(error)))
        finally:
            # The engine waits for a word or an end.
            _exit()

    def _drain(self, timeout_s: float) -> None:
        ended = self._runner is None or self._runner.drain(timeout_s)
        self._send_reports()
        self.send(plain_message(Kind.DRAIN, ended))

    def _end(self, timeout_s: float) -> None:
        self._ending = True
        if self._runner is not None:
            self._runner.close(timeout_s)
            self._send_reports()
        if self._opening is not None:
            # An opening that has just failed closes the tier itself.
            self._opening.join(timeout_s)
        _exit()

    def _give_up(self) -> None:
        """The engine knows how to end this process, and what to tell of the jobs."""
        self.send(message(Kind.HUNG, b""))

    def _send_reports(self) -> None:
        """Write what was reported, all at once. On the tier's thread and others."""
        with self._writing:
            if self._runner is not None and (reports := self._runner.poll()):
                self._send(message(Kind.REPORTS, write_reports(reports)))

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.sendall(data)


class _LogSender(logging.Handler):
    """Hands lines to the engine's log."""

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


def _send_logs(own: str, level: int, send: Callable[[bytes], None]) -> None:
    logging.getLogger().addHandler(_LogSender(own, send))
    logging.getLogger(own).setLevel(level)


def _watch_parent(link: socket.socket) -> None:
    """End with the engine, whatever all other threads are stuck in.

    A copy that the engine forked may hold its end of the socket open; then only the engine's own
    end tells.
    """
    watched = select.poll()
    watched.register(link, 0)
    with contextlib.suppress(OSError):
        watched.register(os.pidfd_open(os.getppid()), select.POLLIN)
    watched.poll()
    # The main thread reads the end of the file now, where it is not stuck.
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RD)
    threading.Event().wait(_ORPHAN_END_S)
    os._exit(1)


def _open_standard_streams() -> None:
    """Take the descriptors of those that the engine does not have.

    What a library writes there must not end up in a socket or the pool.
    """
    while (taken := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(taken)


def _exit() -> None:
    """End now: no thread that hangs, and nothing that a library left, holds the process back."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def main(link_fd: int) -> None:
    """Be a tier's process.

    Args:
        link_fd: the inherited descriptor of a connected socket.
    """
    # When this ends is the engine's business: it closes the tier first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _open_standard_streams()
    faulthandler.enable(_STDERR)
    os.nice(_NICENESS)
    link = socket.socket(fileno=link_fd)
    link.set_inheritable(False)
    threading.Thread(target=_watch_parent, args=(link,), daemon=True).start()
    Child(link).serve()
