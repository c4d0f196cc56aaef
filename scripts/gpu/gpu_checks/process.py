"""One check in its own process, since it may crash, hang or lose the device's context."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from gpu_checks import Check
from gpu_checks.findings import Ended, Failure, Findings, Message, NoDeviceError

#: Time limit for a process to exit after it has reported its end.
_LEAVE_S = 10.0


def run_check(check: Check, limit_s: float, take: Callable[[Message], None]) -> None:
    """Run a check.

    Args:
        check: the check.
        limit_s: time limit, after which it is killed with all that it has started.
        take: called with each finding, while the check runs. A crash or a kill is a failure.
    """
    # Forked, so that torch is imported once. The parent never touches the device.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_be_the_check, args=(check.name, sender))
    process.start()
    sender.close()
    try:
        ended = _listen(receiver, limit_s, take)
        process.join(_LEAVE_S)
        if process.exitcode is None:
            take(Failure(f"its process did not leave within {_LEAVE_S:.0f} s"))
        elif process.exitcode or not ended:
            take(Failure(f"its process died: {_describe(process.exitcode)}"))
    except TimeoutError as late:
        take(Failure(str(late)))
    finally:
        receiver.close()
        if process.is_alive():
            _kill(process.pid)
            process.join(_LEAVE_S)


def _listen(receiver: Connection, limit_s: float, take: Callable[[Message], None]) -> bool:
    """Pass on the messages of a check until its end.

    Returns:
        False if its process died before that.

    Raises:
        TimeoutError: its time is over.
    """
    deadline_s = time.monotonic() + limit_s
    while receiver.poll(max(0.0, deadline_s - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            return False
        take(message)
        if isinstance(message, Ended):
            return True
    raise TimeoutError(f"was ended after {limit_s:.0f} s")


def _be_the_check(name: str, sender: Connection) -> None:
    os.setsid()
    lock = threading.Lock()

    def send(message: Message) -> None:
        # Log records come from any thread.
        with lock:
            sender.send(message)

    findings = Findings(send)
    logging.basicConfig(level=logging.WARNING, handlers=[_Log(findings)])
    wanted = ""
    try:
        importlib.import_module(f"gpu_checks.{name}").check(findings)
    except NoDeviceError as reason:
        wanted = str(reason)
    except BaseException:
        send(Failure(traceback.format_exc().rstrip()))
    send(Ended(wanted))


class _Log(logging.Handler):
    """A handler that puts log records into the report."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        self._findings.figure(f"{record.levelname} of {record.name}", record.getMessage())


def _kill(group: int | None) -> None:
    if group is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _describe(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
