"""LMCache's own server, started with the command from docs/engines.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from support.server import free_port

_PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
_PATIENCE_S = 120.0


class LMCacheServer:
    def __init__(self, folder: Path, adapter: dict[str, Any] | None = None) -> None:
        (text,) = re.findall(r"^    (lmcache server .*?)^    \}'$", _PAGE.read_text(), re.M | re.S)
        text = text.replace("\\\n", " ").replace("--l1-size-gb 64", "--l1-size-gb 0.25")
        self.port, self._http_port = free_port(), free_port()
        # Give each server's shared memory its own name, because several servers may run at once.
        text = text.replace("--shm-name lmcache", f"--shm-name lmcache-{self.port}")
        program, *arguments = shlex.split(text.replace("/data/kv", f"{folder}/kv") + "}'")
        if adapter is not None:
            arguments[-1] = json.dumps(adapter)
        arguments += ["--port", str(self.port), "--http-port", str(self._http_port)]
        self._log = folder / f"lmcache-{self.port}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).with_name(program)), *arguments], stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        try:
            wait_until(self._answers, "the server to answer")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status") as page:
            status: dict[str, Any] = json.load(page)
        return status

    def forget(self) -> None:
        url = f"http://127.0.0.1:{self._http_port}/cache/clear"
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()

    def log(self) -> str:
        return self._log.read_text()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            self.status()
        except urllib.error.URLError:
            return False
        return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.002)
