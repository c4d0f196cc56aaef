"""Names of files that are still being written, which tell whether their writer is alive."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"(\d+)-(\d+)-[0-9a-f]+-\d+\.tmp")


class TemporaryNames:
    """Names that nobody else uses: not another process, thread, tier or boot of this machine.

    A name is ``<pid>-<start>-<random>-<counter>.tmp``. With the moment at which the process
    started (clock ticks since boot), a process number that has come round again is not mistaken
    for the writer.
    """

    def __init__(self) -> None:
        pid = os.getpid()
        self._prefix = f"{pid}-{_start_ticks(pid)}-{os.urandom(8).hex()}"
        self._counter = itertools.count()

    def new(self) -> str:
        """A name that was never used. Callable from any thread."""
        return f"{self._prefix}-{next(self._counter)}.tmp"


def stale(names: Iterable[str]) -> list[str]:
    """Pick out the temporaries that nobody is writing any more.

    Args:
        names: what lies in a directory of temporaries; those that are none are left out.

    Returns:
        The names whose writer has ended.
    """
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match and _start_ticks(int(match[1])) != int(match[2]):
            found.append(name)
    return found


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, or ``None`` if there is no such one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may hold anything; the start is the
    # twenty-second, so the twentieth behind it.
    return int(text.rpartition(")")[2].split()[19])
