"""Starts, watches and ends a tier's process, on the engine's side."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from kvtier_sdk.aio.clock import Clock, wait_out, wait_within
from kvtier_sdk.errors import TierUnavailableError
from kvtier_sdk.events import Announce
from kvtier_sdk.options.secret_sources import environment_without_secrets
from kvtier_sdk.options.secrets import Secrets
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.process.bootstrap import read_error
from kvtier_sdk.runner.process.messages import (
    READ_BYTES,
    Channel,
    Kind,
    MessageError,
    message,
    plain_message,
    read_event,
    read_plain,
)

# The program gets the engine's ``sys.path`` as arguments, so that it finds the same modules.
_PROGRAM = (
    "import sys; name, control, data, *sys.path = sys.argv[1:]; "
    "from kvtier_sdk.runner.process.child import main; main(name, int(control), int(data))"
)
#: A process is killed this long after it has closed its end of a socket.
_PARTING_S = 1.0
#: The errors that reading an invalid message can raise.
_NONSENSE = (MessageError, LookupError, TypeError, ValueError)
#: Interval between pings of a process that may be stuck, and the maximum number of unanswered
#: pings. Pings are counted, because elapsed time would include the machine's suspensions.
_PING_S = 1.0
_MAX_UNANSWERED = 10
#: Longer stderr lines are cut, because a library may write much text without a line end.
_MAX_LINE_BYTES = 4096
#: The number of last stderr lines to repeat in the log when the process dies.
_LAST_LINES = 4
#: First words of the stack that faulthandler writes at a crash. The stack is too long to repeat.
_STACK_STARTS = ("Current thread 0x", "Thread 0x")


@dataclass(eq=False)
class ChildProcess:
    """The engine's handle to a tier's process.

    The engine's thread uses the ``data`` socket for jobs, reports and log lines about the end of an
    outage. The event loop uses the control socket for all other messages.
    """

    _name: str
    _clock: Clock
    _log: TierLog
    _secrets: Secrets
    _announce: Announce | None = None
    is_open: bool = False
    started_s: float = 0.0
    _drained: asyncio.Future[bool] | None = None
    _process: subprocess.Popen[bytes] | None = None
    _stderr: _StderrLog | None = None
    _reaper: threading.Thread | None = None
    _killed_for: str | None = None
    _unanswered: int = 0
    _pinging: bool = False

    def __post_init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        # The result is the reason why the process has ended.
        self.ended: asyncio.Future[str] = self._event_loop.create_future()
        self._opened: asyncio.Future[None] = self._event_loop.create_future()
        self._control, self._their_control = _socket_pair()
        self.data, self._their_data = _socket_pair()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, bootstrap: Mapping[str, Any], pool_fd: int) -> None:
        """Start the process, and wait until it accepts jobs. After a failure, call :meth:`end`."""
        with self._their_control, self._their_data:
            try:
                self._spawn(pool_fd)
            except Exception as error:  # such as too many processes, or a bad argument
                if self._process is not None:
                    self._process.kill()
                    self._process.communicate()
                self.ended.set_result("it was not started")
                raise self._unavailable(f"its process cannot be started: {error}") from error
        assert self._stderr is not None
        self._event_loop.add_reader(self._control, self._read_control)
        self._event_loop.add_reader(self._stderr, self._read_stderr, self._stderr)
        self._send(plain_message(Kind.BOOTSTRAP, bootstrap))
        await self._opened

    def change(self, options: Mapping[str, Any]) -> None:
        self._send(plain_message(Kind.OPTIONS, options))

    async def drain(self, timeout_s: float) -> bool:
        """Drain the tier; return true if all jobs have ended or the process is gone."""
        self._drained = self._event_loop.create_future()
        self._send(plain_message(Kind.DRAIN, timeout_s))
        if not self.ended.done():
            await wait_within(self._clock, 2 * timeout_s + 0.5, [self._drained])
        return self.ended.done() or (self._drained.done() and self._drained.result())

    async def end(self, timeout_s: float) -> None:
        """Close the tier, and kill the process if it outlives the time limit."""
        # A cancellation kills the process immediately. When this call ends, the process has ended.
        self._send(plain_message(Kind.CLOSE, timeout_s / 2))
        try:
            if not await wait_within(self._clock, timeout_s, [self.ended]):
                self._log.warning(
                    "the tier did not close within %g s; its process is killed", timeout_s
                )
        finally:
            self.kill()
            await wait_out([self.ended])
            self.let_go()

    def kill(self, reason: str | None = None) -> None:
        if self._process is not None and not self.ended.done():
            self._killed_for = self._killed_for or reason
            self._process.kill()

    def kill_and_wait(self) -> None:
        """Block until the process is gone. Call this only after the loop has stopped."""
        self.kill()
        if self._reaper is not None:
            self._reaper.join()

    def lost(self, error: Exception | None) -> None:
        """Kill a process that has closed its socket or sent an invalid message."""
        if error is None:
            # Give the process time to end by itself.
            self._clock.call_at(self._clock.now_s() + _PARTING_S, self.kill)
        else:
            self._log.error("the tier's process is killed: it sent %s", error)
            self.kill()

    def suspect(self) -> None:
        """Ping the process until it answers; kill it after too many unanswered pings."""
        if not self._pinging:
            self._pinging = True
            self._unanswered = 0
            self._ping()

    def _ping(self) -> None:
        if self.ended.done() or not self._pinging:
            return
        if self._unanswered == _MAX_UNANSWERED:
            self.kill("it was stuck, and was killed")
            return
        self._unanswered += 1
        self._send(message(Kind.PING))
        self._clock.call_at(self._clock.now_s() + _PING_S, self._ping)

    def _read_control(self) -> None:
        error = None
        try:
            for kind, body in self._control.read():
                self._take(kind, body)
        except _NONSENSE as caught:
            error = caught
        if error is not None or self._control.at_end:
            self._event_loop.remove_reader(self._control)
            self.lost(error)

    def _read_stderr(self, stderr: _StderrLog) -> None:
        if not stderr.read():
            self._event_loop.remove_reader(stderr)

    def _send(self, data: bytes) -> None:
        self._control.send(data, self._event_loop)

    def let_go(self) -> None:
        """Close the control socket of a process that has ended. A second call does nothing."""
        if self._control.fileno() >= 0:
            self._event_loop.remove_reader(self._control)
            self._event_loop.remove_writer(self._control)
            self._control.close()

    def _take(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.LOG:
            level, text = read_plain(body)
            self._log.logger.log(level, "%s", text)
        elif kind is Kind.INVENTORY and self._announce is not None:
            self._announce(read_event(body))
        elif kind is Kind.OPENED and not self._opened.done():
            self.is_open = bool(read_plain(body))
            self.started_s = self._clock.now_s()
            self._opened.set_result(None)
        elif kind is Kind.REFUSED and not self._opened.done():
            self._opened.set_exception(read_error(read_plain(body)))
        elif kind is Kind.DRAIN and self._drained is not None and not self._drained.done():
            self._drained.set_result(bool(read_plain(body)))
        elif kind is Kind.HUNG:
            self.kill("calls hung, and it was killed")
        elif kind is Kind.PING:
            self._pinging = False

    def _spawn(self, pool_fd: int) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        fds = [self._their_control.fileno(), self._their_data.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, self._name, *map(str, fds), *path],
            pass_fds=[*fds, pool_fd],
            env=environment_without_secrets(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # A terminal's Ctrl-C must reach only the engine.
            process_group=0,
        )
        assert self._process.stderr is not None
        self._stderr = _StderrLog(self._process.stderr, self._log, self._secrets)
        self._reaper = threading.Thread(
            target=self._reap, args=(self._process,), name=f"kvtier-{self._name}-wait", daemon=True
        )
        self._reaper.start()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._event_loop.call_soon_threadsafe(self._reaped, code)

    def _reaped(self, code: int) -> None:
        # Read the last messages. All have arrived, because the process has ended.
        if self._control.fileno() >= 0:
            self._read_control()
        reason = self._killed_for or _end_in_words(code)
        if self._stderr is not None:
            self._event_loop.remove_reader(self._stderr)
            if (printed := self._stderr.close()) and not self._killed_for and code:
                reason = f"{reason}; it printed {printed!r}"
        if not self._opened.done():
            self._opened.set_exception(self._unavailable(f"the tier's process died: {reason}"))
            # No task awaits a cancelled opening, so mark its exception as retrieved.
            self._opened.exception()
        self.ended.set_result(reason)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(True)

    def _unavailable(self, text: str) -> TierUnavailableError:
        return TierUnavailableError(text).labelled(self._name, "open")


@dataclass(eq=False)
class _StderrLog:
    """Copies a process's standard error to the tier's log."""

    _pipe: IO[bytes]
    _log: TierLog
    _secrets: Secrets
    _rest: bytes = b""
    _in_stack: bool = False

    def __post_init__(self) -> None:
        os.set_blocking(self._pipe.fileno(), False)
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> bool:
        """Log the lines received so far; return false at the end of the pipe."""
        while True:
            try:
                data = os.read(self.fileno(), READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return True
            *lines, self._rest = (self._rest + data).split(b"\n")
            if not data or len(self._rest) > _MAX_LINE_BYTES:
                lines.append(self._rest)
                self._rest = b""
            self._take(lines)
            if not data:
                return False

    def close(self) -> str:
        """Read the remaining text and close the pipe; return the last lines."""
        if self.read() and self._rest:
            self._take([self._rest])
        self._pipe.close()
        return "; ".join(self._last)

    def _take(self, lines: list[bytes]) -> None:
        texts = [line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip() for line in lines]
        for file in self._secrets.files if any(texts) else ():
            # The process may print a newer secret than the engine has, so read the files again.
            with contextlib.suppress(OSError, ValueError):
                file.read_again()
        texts = [self._secrets.mask(text) for text in texts if text]
        for text in texts:
            self._in_stack = self._in_stack or text.startswith(_STACK_STARTS)
            if not self._in_stack:
                self._last.append(text)
        if texts:
            self._log.log(logging.WARNING, "stderr: %s", "\n".join(texts))


def _socket_pair() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        return Channel(ours), socket.socket(fileno=copy_fd(theirs.fileno()))


def copy_fd(fd: int) -> int:
    # The child needs descriptors 0 to 2 for its streams, but the engine may use them for files.
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _end_in_words(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"signal {-code} (killed, perhaps for want of memory)"
    return f"signal {-code}" if code < 0 else f"exit status {code}"
