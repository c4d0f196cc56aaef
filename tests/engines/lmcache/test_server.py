"""LMCache's own server starts with the command that the page shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.lmcache_host import wait_until
from support.redis_server import free_port

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_command_of_the_page_starts_a_server_with_the_adapter(tmp_path: Path) -> None:
    (text,) = re.findall(r"^    (lmcache server .*?)^    \}'$", PAGE.read_text(), re.M | re.S)
    text = text.replace("--l1-size-gb 64", "--l1-size-gb 0.25").replace(
        "/data/kv", f"{tmp_path}/kv"
    )
    program, *arguments = shlex.split(text + "}'")
    page_port = free_port()
    ports = ["--port", str(free_port()), "--http-port", str(page_port)]
    command = [str(Path(sys.executable).with_name(program)), *arguments, *ports]
    status: list[Any] = []
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{page_port}/status") as page:
                status.append(json.load(page))
        except urllib.error.URLError:
            return False
        return True

    try:
        wait_until(answers, "the server to answer")
    finally:
        server.terminate()
        server.wait()
    text = json.dumps(status[-1])
    assert '"type": "KVTierL2Adapter"' in text
    assert '"is_healthy": false' not in text
