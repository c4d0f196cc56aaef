"""How much memory this machine has, and what the control groups that we are in leave of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_sdk.errors import ConfigError

#: Where the system tells about itself.
PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """A control group that limits the memory of this process.

    Attributes:
        directory: of the group, or of one above it.
        limit_bytes: what its processes may take together.
        used_bytes: what they take now, file cache included.
    """

    directory: Path
    limit_bytes: int
    used_bytes: int


def total_memory_bytes(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> int:
    """The memory of the machine, or less where a control group allows less.

    Args:
        proc: where ``/proc`` is.
        cgroup_root: where control groups are mounted.

    Returns:
        Bytes.

    Raises:
        ConfigError: the system does not say.
    """
    limits = (limit.limit_bytes for limit in memory_limits(proc, cgroup_root))
    return min([meminfo_bytes("MemTotal", proc), *limits])


def meminfo_bytes(name: str, proc: Path = PROC) -> int:
    """A figure of ``/proc/meminfo``.

    Args:
        name: as it stands there: ``MemTotal``, ``MemAvailable``.
        proc: where ``/proc`` is.

    Returns:
        Bytes.

    Raises:
        ConfigError: the system does not say.
    """
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        found, _, value = line.partition(":")
        if found == name:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{proc}/meminfo does not say {name}")


def memory_limits(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> Iterator[MemoryLimit]:
    """The limits of this process's control groups, versions 1 and 2, as far as they can be read.

    Args:
        proc: where ``/proc`` is.
        cgroup_root: where control groups are mounted.

    Yields:
        Those of its own groups first, then of those above.
    """
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
        # In a container the path may be that of the host, or begin with "/..", while the top is
        # the container's own.
        group = top / path.lstrip("/.")
        for directory in [group, *group.parents]:
            if not directory.is_relative_to(top):
                break
            # A limit that is not there is "max", and none may be readable.
            with contextlib.suppress(OSError, ValueError):
                limit_bytes = int((directory / limit).read_text())
                yield MemoryLimit(directory, limit_bytes, int((directory / used).read_text()))


def cached_bytes(directory: Path) -> int:
    """What the kernel would take back from a control group's file cache.

    Args:
        directory: the group's.

    Returns:
        Bytes.

    Raises:
        OSError: it cannot be read.
    """
    names = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
    sizes = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    own = sum(int(sizes.get(name, 0)) for name in names[:2])
    return max(own, sum(int(sizes.get(name, 0)) for name in names[2:]))
