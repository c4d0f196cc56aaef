from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np

from kvtier_sdk import HostPool, PoolLayout
from support.gpu.accelerator import MIB
from support.gpu.copies import Bytes

#: The fewest slots of a pool in /dev/shm: enough for tests, but too few to measure s/GB.
_MIN_SLOTS = 16


def mapped(slots: int, part_bytes: int) -> Bytes:
    """Return zeros on whole pages, which a worker can register."""
    memory = np.frombuffer(mmap.mmap(-1, slots * part_bytes), np.uint8)
    return memory.reshape(slots, part_bytes)


def pools(size_bytes: int) -> Iterator[tuple[str, HostPool]]:
    slots = size_bytes // MIB
    kinds: dict[str, Callable[[], HostPool]] = {
        "heap": lambda: HostPool(slots, MIB),
        "memfd": lambda: HostPool.create(PoolLayout(slots, MIB)),
        "/dev/shm": lambda: HostPool.join(
            f"gpu-checks-{os.getpid()}", PoolLayout(_slots_in_shm(slots), MIB)
        ),
    }
    for kind, make in kinds.items():
        with contextlib.closing(make()) as pool:
            yield kind, pool


def _slots_in_shm(slots: int) -> int:
    free = os.statvfs("/dev/shm")
    return max(_MIN_SLOTS, min(slots, free.f_bavail * free.f_frsize // 2 // MIB))
