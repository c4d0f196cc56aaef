"""The standard error of a tier's process, as the engine reads it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from typing import IO

from kvtier_sdk.options.secrets import Secrets
from kvtier_sdk.runner.log import TierLog

_READ_BYTES = 1 << 16
#: A line is cut at this length, because a library may write without ever ending one.
_MAX_LINE_BYTES = 4096
#: How many of the last lines are repeated when the process dies.
_LAST_LINES = 4
#: Begins a stack that faulthandler writes when a process crashes: good for the log, too long to
#: repeat.
_STACK_STARTS = ("Current thread 0x", "Thread 0x")


class StderrLog:
    """Writes the lines to the tier's log, and keeps the last ones. Reading never waits."""

    def __init__(self, pipe: IO[bytes], log: TierLog, secrets: Secrets) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._log = log
        self._secrets = secrets
        self._rest = b""
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._in_stack = False

    def fileno(self) -> int:
        """Return the pipe's descriptor."""
        return self._pipe.fileno()

    def read(self) -> bool:
        """Log the lines that have arrived; return false at the end of the pipe."""
        while True:
            try:
                data = os.read(self.fileno(), _READ_BYTES)
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
        """Read the rest and close the pipe; return the last lines."""
        if self.read() and self._rest:
            self._take([self._rest])
        self._pipe.close()
        return "; ".join(self._last)

    def _take(self, lines: list[bytes]) -> None:
        texts = [line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip() for line in lines]
        for file in self._secrets.files if any(texts) else ():
            # The process may have read a newer secret than the engine, and printed it.
            with contextlib.suppress(OSError, ValueError):
                file.read_again()
        texts = [self._secrets.mask(text) for text in texts if text]
        for text in texts:
            self._in_stack = self._in_stack or text.startswith(_STACK_STARTS)
            if not self._in_stack:
                self._last.append(text)
        if texts:
            self._log.log(logging.WARNING, "stderr: %s", "\n".join(texts))
