"""Server processes on the loopback, which a test can freeze and kill."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_PATIENCE_S = 30.0


class ServerError(Exception):
    pass


def free_port() -> int:
    # Avoid the system's ephemeral ports, because a client could get such a port while the server is
    # down. A Redis Cluster node also uses the port that is 10,000 higher.
    for port in random.sample(range(12_000, 22_700), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("no port is free")


class ServerProcess:
    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def launch(self, *command: str | Path) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            is_running = self._process is not None and self._process.poll() is None
            if not is_running or time.monotonic() > end_s:
                self.kill()
                raise ServerError(f"waited in vain until {what}\n{self.log.read_text()}")
            time.sleep(0.02)

    def pause(self) -> None:
        """Freeze the server. A frozen server accepts connections, but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
