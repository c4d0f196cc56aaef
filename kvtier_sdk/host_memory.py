"""How much memory this machine has, or the container that we are in."""

from __future__ import annotations

from pathlib import Path

from kvtier_sdk.errors import ConfigError

_PROC = Path("/proc")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def total_memory_bytes(proc: Path = _PROC, cgroup_root: Path = _CGROUP_ROOT) -> int:
    """The memory of the machine, or less where a control group (version 2) allows less.

    Args:
        proc: where ``/proc`` is.
        cgroup_root: where control groups are mounted.

    Returns:
        Bytes.

    Raises:
        ConfigError: the system does not say.
    """
    limits = [_machine_bytes(proc)]
    group = cgroup_root / _own_group(proc)
    for directory in (group, *group.parents):
        try:
            text = (directory / "memory.max").read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _machine_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{proc}/meminfo does not say how much memory the machine has")


def _own_group(proc: Path) -> str:
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line[3:].lstrip("/.") for line in lines if line.startswith("0::")), "")
