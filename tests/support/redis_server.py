"""A dedicated redis-server on the loopback, for tests and for scripts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import redis

from support.server import ServerError, ServerProcess, free_port


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerError(f"{name} is missing: try 'make redis-server'")
    return found


class Server(ServerProcess):
    def __init__(self, directory: Path, *options: str, sentinel: str | None = None) -> None:
        super().__init__(directory / "log")
        self.directory = directory
        self.port = free_port()
        self.options = ["--port", str(self.port), "--bind", "127.0.0.1", *options]
        self.sentinel = sentinel
        self.client_options: dict[str, object] = {"port": self.port}

    def start(self, ready: Callable[[], object] | None = None) -> Server:
        arguments = ["--dir", str(self.directory), "--save", "", *self.options]
        if self.sentinel is not None:
            (self.directory / "sentinel.conf").write_text(f"port {self.port}\n{self.sentinel}\n")
            arguments = [str(self.directory / "sentinel.conf"), "--sentinel"]
        self.launch(program("redis-server"), *arguments)
        self.wait_until(ready or (lambda: self.ask("PING")), "it answers")
        return self

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            try:
                return condition()
            except redis.RedisError:
                return False

        super().wait_until(holds, f"redis-server: {what}")

    def is_loading(self) -> bool:
        return bool(self.ask("INFO", "persistence")["loading"])  # type: ignore[index]

    def ask(self, *words: object) -> object:
        with self.client() as client:
            return client.execute_command(*words)

    def client(self) -> redis.Redis:
        return redis.Redis(**self.client_options, socket_timeout=5)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"
