"""Processes that map a host pool, and evaluate Python expressions that a test sends.

The processes run this module as their program. They answer each expression with a line of JSON. In
an expression, ``pool`` is the pool of the last ``join`` or ``attach``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier_sdk import HostPool, PoolLayout

TESTS = Path(__file__).parents[1]


def pattern(worker: int, slot: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([worker, slot]).integers(1, 256, size_bytes, np.uint8)


def fill(pool: HostPool, worker: int) -> None:
    part = pool.part(worker)
    for slot in range(pool.slots):
        part[slot] = pattern(worker, slot, pool.layout.part_bytes)


def wrong_rows(pool: HostPool, worker: int, part_of: int | None = None) -> int:
    """Count rows without ``worker``'s pattern in worker ``part_of``'s part; default: its own."""
    part = pool.part(worker if part_of is None else part_of)
    return sum(
        not np.array_equal(part[slot], pattern(worker, slot, pool.layout.part_bytes))
        for slot in range(pool.slots)
    )


def names_in(directory: str | Path) -> list[str]:
    return sorted(path.name for path in Path(directory).glob("kvtier-pool-*"))


class ChildError(Exception):
    pass


class PoolProcess:
    def __init__(self, pass_fds: tuple[int, ...] = ()) -> None:
        self._is_reusable = not pass_fds
        self._open_lines = 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "support.pool_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._open_lines += 1
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process has died: {self._process.wait()}"
        self._open_lines -= 1
        value, error = json.loads(line)
        if error is not None:
            raise ChildError(error)
        return value

    def run(self, line: str) -> Any:
        self.send(line)
        return self.answer()

    def is_at_rest(self) -> bool:
        return self._is_reusable and not self._open_lines

    def kill(self) -> None:
        self._is_reusable = False
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # Closing a pipe flushes an unsent line, which fails because the process has ended.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class PoolProcesses:
    def __init__(self) -> None:
        self._idle: list[PoolProcess] = []
        self._given: list[PoolProcess] = []

    def start(self, *, pass_fds: tuple[int, ...] = ()) -> PoolProcess:
        known = not pass_fds and self._idle
        self._given.append(self._idle.pop() if known else PoolProcess(pass_fds))
        return self._given[-1]

    def take_back(self) -> None:
        for process in self._given:
            if process.is_at_rest():
                process.run("forget()")
                self._idle.append(process)
            else:
                process.kill()
        self._given.clear()

    def kill(self) -> None:
        for process in self._idle:
            process.kill()


def _lines() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


def main() -> None:
    scope: dict[str, Any] = {
        "PoolLayout": PoolLayout,
        "fill": fill,
        "os": os,
        "wrong_rows": wrong_rows,
    }

    def keep(pool: HostPool) -> None:
        scope["pool"] = pool

    scope["join"] = lambda *args, **options: keep(HostPool.join(*args, **options))
    scope["attach"] = lambda *args, **options: keep(HostPool.attach(*args, **options))
    scope["forget"] = lambda: scope.pop("pool", None) and None
    scope["fork"] = lambda action: _in_forked_child(lambda: eval(action, scope))
    for line in _lines():
        try:
            answer = [eval(line, scope), None]
        except Exception as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


def _in_forked_child(action: Any) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(Exception):
            action()
            status = 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
