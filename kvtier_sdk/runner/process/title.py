"""The name of a process in the list of processes."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

#: Indices of the command line's bounds among the fields of /proc/PID/stat after the name.
_ARG_START, _ARG_END = 45, 46


def set_process_title(title: str, *, short: str) -> None:
    """Name this process, on Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_bytes(short.encode()[:15])
        # The name, in parentheses, may contain blanks.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if start < end:
            # Overwriting is safe: Python keeps copies of its arguments. The last byte stays 0, as
            # the text's end.
            text = title.encode()[: end - start - 1]
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
