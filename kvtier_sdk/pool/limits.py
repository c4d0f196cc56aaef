"""Checks that the machine, the control groups and a directory have room for a host pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.units import format_bytes

_PROC = Path("/proc")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    where: str
    free_bytes: int
    remedy: str


def check_room(size_bytes: int, directory: Path | None = None) -> None:
    available_bytes = _meminfo_bytes("MemAvailable", _PROC)
    rooms = [
        Room("this machine's memory", available_bytes, "end what else uses memory"),
        *rooms_of_cgroups(),
    ]
    if directory is not None:
        try:
            status = os.statvfs(directory)
        except OSError as error:
            raise ConfigError(
                f"a shared host pool needs {directory}: {error.strerror}; mount a tmpfs there"
            ) from error
        how = "docker run --shm-size, in Kubernetes an emptyDir of medium Memory"
        free_bytes = status.f_bavail * status.f_frsize
        rooms.append(Room(str(directory), free_bytes, f"make {directory} larger ({how})"))
    tightest = min(rooms, key=lambda room: room.free_bytes)
    if size_bytes > tightest.free_bytes:
        raise ConfigError(
            f"the host pool needs {format_bytes(size_bytes)}, and "
            f"{format_bytes(max(0, tightest.free_bytes))} are free in {tightest.where}: "
            f"make the pool smaller, or {tightest.remedy}"
        )


def total_memory_bytes(proc: Path = _PROC, cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Return the machine's memory or the lowest control-group limit, whichever is smaller."""
    limits = (limit_bytes for _, limit_bytes, _ in _memory_limits(proc, cgroup_root))
    return min([_meminfo_bytes("MemTotal", proc), *limits])


def rooms_of_cgroups(proc: Path = _PROC, cgroup_root: Path = _CGROUP_ROOT) -> Iterator[Room]:
    for directory, limit_bytes, used_bytes in _memory_limits(proc, cgroup_root):
        with contextlib.suppress(OSError):
            free_bytes = limit_bytes - used_bytes + _cached_bytes(directory)
            where = f"the memory limit of {directory}"
            yield Room(where, free_bytes, "raise the limit of this container")


def _meminfo_bytes(name: str, proc: Path) -> int:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        found, _, value = line.partition(":")
        if found == name:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{proc}/meminfo does not say {name}")


def _memory_limits(proc: Path, cgroup_root: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield the directory, limit and use of each control group of this process (v1 and v2)."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used = cgroup_root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = cgroup_root / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container, ``top`` is the container's own group, but ``path`` may be a path of the
        # host or begin with "/..". So some of these directories may not exist.
        group = top / path.lstrip("/.")
        for directory in [group, *group.parents]:
            if not directory.is_relative_to(top):
                break
            # Skip unreadable files and the value "max", which means that there is no limit.
            with contextlib.suppress(OSError, ValueError):
                limit_bytes = int((directory / limit).read_text())
                yield directory, limit_bytes, int((directory / used).read_text())


def _cached_bytes(directory: Path) -> int:
    sizes = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    # In version 1, only the ``total_`` entries include the groups below this group.
    names = "inactive_file", "active_file"
    return sum(int(sizes.get(f"total_{name}", sizes.get(name, 0))) for name in names)
