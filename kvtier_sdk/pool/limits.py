"""The memory of this machine, and the limits of this process's control groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_sdk.errors import ConfigError

#: The kernel's own files.
PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """A control group that limits the memory of this process.

    Attributes:
        directory: the directory of the group, or of one above it.
        limit_bytes: the memory that its processes may use together.
        used_bytes: the memory that they use now, file cache included.
    """

    directory: Path
    limit_bytes: int
    used_bytes: int


def file_system_of(directory: Path, proc: Path = PROC) -> str | None:
    """Return the type of the file system that a directory is on: ``tmpfs``, ``ext4``."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open(proc / "self/mountinfo", encoding="utf-8") as file:
        # proc_pid_mountinfo(5): the device is the third field, the type follows the separator.
        for line in file:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return None


def total_memory_bytes(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Return the memory of the machine, or the limit of a control group if that is less.

    Raises:
        ConfigError: the kernel does not report the machine's memory.
    """
    limits = (limit.limit_bytes for limit in memory_limits(proc, cgroup_root))
    return min([meminfo_bytes("MemTotal", proc), *limits])


def meminfo_bytes(name: str, proc: Path = PROC) -> int:
    """Return a value of ``/proc/meminfo``.

    Raises:
        ConfigError: there is no such value.
    """
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        found, _, value = line.partition(":")
        if found == name:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{proc}/meminfo does not say {name}")


def memory_limits(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> Iterator[MemoryLimit]:
    """Yield the readable limits of this process's control groups, versions 1 and 2."""
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
        # In a container the path may be the host's, or begin with "/..", while the top is the
        # container's own.
        group = top / path.lstrip("/.")
        for directory in [group, *group.parents]:
            if not directory.is_relative_to(top):
                break
            # A group without a limit has "max", and some files cannot be read.
            with contextlib.suppress(OSError, ValueError):
                limit_bytes = int((directory / limit).read_text())
                yield MemoryLimit(directory, limit_bytes, int((directory / used).read_text()))


def cached_bytes(directory: Path) -> int:
    """Return the size of a control group's file cache, which the kernel can reclaim.

    Raises:
        OSError: it cannot be read.
    """
    names = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
    sizes = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    own = sum(int(sizes.get(name, 0)) for name in names[:2])
    return max(own, sum(int(sizes.get(name, 0)) for name in names[2:]))
