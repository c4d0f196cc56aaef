"""A memcached server for tests."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from contextlib import closing

_START_S = 20.0


class MemcachedServer:
    """A memcached process on a free port. After :meth:`kill`, :meth:`start` reuses the port."""

    def __init__(self, *options: str) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            self.port: int = probe.getsockname()[1]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"memcached://127.0.0.1:{self.port}"

    def start(self) -> MemcachedServer:
        """Start an empty server, and wait until it answers."""
        program = shutil.which("memcached")
        assert program, "memcached is missing: as root, apt-get install memcached"
        command = [program, "-u", "nobody", "-l", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen([*command, *self._options])
        end_s = time.monotonic() + _START_S
        while True:
            try:
                self.ask(b"version")
            except OSError:
                assert self._process.poll() is None, "memcached has ended"
                assert time.monotonic() < end_s, "memcached does not answer"
                time.sleep(0.02)
            else:
                return self

    def kill(self) -> None:
        """Kill the server if it runs. All values are lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Freeze the server, so that it accepts connections but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, command: bytes, data: bytes | None = None) -> tuple[bytes, bytes]:
        """Send a command; return the reply's first line and the value, which may be empty."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(command + b"\r\n" + (b"" if data is None else data + b"\r\n"))
            with connection.makefile("rb") as replies:
                line = replies.readline()
                if not line:
                    raise ConnectionError("no reply")
                return line, replies.read(int(line[3:])) if line.startswith(b"VA") else b""

    def names(self) -> list[str]:
        end_s = time.monotonic() + _START_S
        # Try again, because the server's first lists may be incomplete.
        while len(lines := self._lines(b"lru_crawler metadump all")) != self._count():
            assert time.monotonic() < end_s, "memcached does not list its values"
            time.sleep(0.02)
        return [line.split()[0].removeprefix(b"key=").decode() for line in lines]

    def _count(self) -> int:
        lines = [line.split() for line in self._lines(b"stats")]
        return next(int(value) for _, name, value in lines if name == b"curr_items")

    def _lines(self, command: bytes) -> list[bytes]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(command + b"\r\n")
            with connection.makefile("rb") as replies:
                return list(iter(replies.readline, b"END\r\n"))
