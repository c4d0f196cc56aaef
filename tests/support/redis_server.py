"""A dedicated redis-server on the loopback, for tests and for scripts."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

_START_S = 20.0


class ServerError(Exception):
    """A server is missing or did not start; the message says why, with its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    # A cluster's node also listens on the port 10,000 higher, which must exist.
    return port if port < 55_000 else free_port()


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerError(f"{name} is missing: try 'make redis-server'")
    return found


class Server:
    """A redis-server process with its own directory, on a free port.

    It keeps its port: :meth:`start` after :meth:`kill` is a restart.
    """

    def __init__(self, directory: Path, *options: str, sentinel: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.options = ["--port", str(self.port), "--bind", "127.0.0.1", *options]
        self.sentinel = sentinel
        self.client_options: dict[str, object] = {"port": self.port}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ready: Callable[[], object] | None = None) -> Server:
        arguments = ["--dir", str(self.directory), "--save", "", *self.options]
        if self.sentinel is not None:
            (self.directory / "sentinel.conf").write_text(f"port {self.port}\n{self.sentinel}\n")
            arguments = [str(self.directory / "sentinel.conf"), "--sentinel"]
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [program("redis-server"), *arguments], stdout=log, stderr=log
            )
        self.wait_until(ready or (lambda: self.ask("PING")), "it answers")
        return self

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Poll a condition until it is true; while the server refuses, it counts as false."""
        end_s = time.monotonic() + _START_S
        while True:
            try:
                if condition():
                    return
            except redis.RedisError:
                pass
            if (
                time.monotonic() > end_s
                or self._process is None
                or self._process.poll() is not None
            ):
                log = (self.directory / "log").read_text()
                raise ServerError(f"redis-server: waited in vain until {what}\n{log}")
            time.sleep(0.02)

    def is_loading(self) -> bool:
        return bool(self.ask("INFO", "persistence")["loading"])  # type: ignore[index]

    def ask(self, *words: object) -> object:
        with self.client() as client:
            return client.execute_command(*words)

    def client(self) -> redis.Redis:
        return redis.Redis(**self.client_options, socket_timeout=5)  # type: ignore[arg-type]

    def pause(self) -> None:
        """Let the server hang until :meth:`resume`: connections are accepted, but not answered."""
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

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"
