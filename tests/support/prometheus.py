"""A real Prometheus on the loopback with one target, and its tool for rules."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.server import ServerProcess, free_port

_UNPACKED = Path(__file__).parents[2] / ".prometheus" / "usr" / "bin"
_PATIENCE_S = 30.0
_CONFIG = """
global: {{scrape_interval: 300ms, scrape_timeout: 300ms, evaluation_interval: 300ms}}
scrape_configs:
- job_name: kvtier
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=_UNPACKED)
    assert found is not None, f"{name} is missing: try 'make prometheus'"
    return found


def check_rules(path: Path) -> str:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def play_rules(path: Path) -> str:
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(path)], capture_output=True, text=True
    )
    return done.stdout + done.stderr


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=10) as reply:
            return json.load(reply)["data"]

    def answers(self) -> bool:
        with suppress(OSError):
            self.get("alerts")
            return True
        return False

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, f"waited in vain until {what}"
            time.sleep(0.1)


@contextmanager
def prometheus(directory: Path, *, target_port: int) -> Iterator[Prometheus]:
    config, port = directory / "config.yml", free_port()
    config.write_text(_CONFIG.format(port=target_port))
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = ServerProcess(directory / "log")
    process.launch(*command)
    try:
        server = Prometheus(port)
        process.wait_until(server.answers, "prometheus answers")
        yield server
    finally:
        process.kill()
