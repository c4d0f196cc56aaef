"""A headless Chromium, driven with the DevTools protocol over two pipes."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0
#: With these options the browser can run without a window or a GPU, and as root in a container.
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
)


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    # The browser reads commands from descriptor 3, and writes replies and events to descriptor 4.
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = ["chromium", *_FLAGS, f"--user-data-dir={profile}"]
    with subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            # Closing the pipe for commands ends the browser and all its processes.
            os.close(ours_out)
            process.wait(_TIMEOUT_S)
            os.close(ours_in)


class Browser:
    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = replies
        self._received = b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def show(self, page: Path, *, width: int, height: int, scheme: str) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(name == "Page.loadEventFired" for name, _ in self.events):
            self._take(self._read())
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self.events.append((message["method"], message["params"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            readable, _, _ = select.select([self._replies], [], [], _TIMEOUT_S)
            assert readable, "the browser does not answer"
            part = os.read(self._replies, 2**20)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))
