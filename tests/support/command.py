"""Runs each ``kvtier`` command in a forked process, because starting an interpreter is slow.

A server process imports the command's modules once, and forks for each line of JSON that it reads.
The line names the child's arguments, directory, environment and output files.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TIMEOUT_S = 300.0
_TESTS = Path(__file__).parents[1]
_PROGRAM = """
from support.command import serve
serve()
from kvtier_sdk.cli import main
main()
"""


def kvtier(
    *words: str | os.PathLike[str], cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    arguments = list(map(os.fspath, words))
    with tempfile.TemporaryDirectory(prefix="kvtier-command-") as directory:
        streams = [Path(directory, name) for name in ("out", "err")]
        request = {
            "argv": ["kvtier", *arguments],
            "cwd": str(cwd or Path.cwd()),
            # Commands must not import from a source tree that this process's PYTHONPATH names.
            "env": {**os.environ, "PYTHONPATH": "", **environment},
            "streams": list(map(str, streams)),
        }
        status = _server().ask(request)
        out, err = (stream.read_text() for stream in streams)
    return subprocess.CompletedProcess(arguments, status, out, err)


def kvtier_json(
    *words: str | os.PathLike[str], status: int = 0, **environment: str
) -> dict[str, Any]:
    done = kvtier(*words, "--json", **environment)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


tier = functools.partial(kvtier_json, "tier")


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
        )
        atexit.register(self._end)

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT_S)
        if not ready:
            self._end()
            _server.cache_clear()
            raise subprocess.TimeoutExpired(request["argv"], _TIMEOUT_S)
        return int(self._process.stdout.readline())

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.communicate()


@functools.cache
def _server() -> _Server:
    return _Server()


def serve() -> None:
    """Fork a child for each input line. Only a child returns, with the line's settings applied."""
    # Import before forking, because imports are slow. Forking is safe: imports start no thread.
    for module in ("kvtier_sdk.cli.app", "kvtier_file", "kvtier_redis", "kvtier_s3"):
        importlib.import_module(module)
    replies = os.dup(1)
    with os.fdopen(os.dup(0), "rb", buffering=0) as lines:
        while line := lines.readline():
            if (pid := os.fork()) == 0:
                break
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(replies, b"%d\n" % status)
        else:
            os._exit(0)
    os.close(replies)
    request = json.loads(line)
    for stream, path in zip((0, 1, 2), (os.devnull, *request["streams"]), strict=True):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path.remove(str(_TESTS))
    sys.path[:0] = filter(None, request["env"]["PYTHONPATH"].split(os.pathsep))
