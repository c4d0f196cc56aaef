"""The SDK finds the file behind a mapping that another library made."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier_sdk import KVTierError, Region
from kvtier_sdk.engine import EngineSlots
from kvtier_sdk.engine.engine_memory import open_file_of

SLOTS, ROW_BYTES = 4, 8192


def descriptor_of(view: memoryview) -> int | None:
    return open_file_of(Region.of(view.cast("B")))


@pytest.fixture
def file() -> Iterator[int]:
    """Yield the descriptor of an unnamed file of shared memory, longer than its mapping."""
    fd = os.memfd_create("engine")
    os.ftruncate(fd, (SLOTS + 1) * ROW_BYTES)
    yield fd
    os.close(fd)


def map_rows(fd: int, *, offset: int = 0, flags: int = mmap.MAP_SHARED) -> memoryview:
    mapping = mmap.mmap(fd, SLOTS * ROW_BYTES, flags=flags, offset=offset)
    return np.frombuffer(mapping, np.int8).reshape(SLOTS, ROW_BYTES).data


def test_the_descriptor_is_of_the_memory_itself(file: int) -> None:
    view = map_rows(file)
    found = descriptor_of(view)
    assert found is not None
    assert found != file
    np.asarray(view)[2, 5] = 77
    assert os.pread(found, 1, 2 * ROW_BYTES + 5) == bytes([77])
    os.close(found)


@pytest.mark.parametrize(
    "how", [{"offset": ROW_BYTES}, {"flags": mmap.MAP_PRIVATE}], ids=["middle", "private"]
)
def test_memory_that_another_process_would_see_differs(file: int, how: dict[str, int]) -> None:
    assert descriptor_of(map_rows(file, **how)) is None
    assert descriptor_of(np.zeros((SLOTS, ROW_BYTES), np.int8).data) is None


def test_a_file_that_nobody_has_open_any_more_is_not_found() -> None:
    size_bytes = SLOTS * ROW_BYTES
    fd = os.memfd_create("engine")
    os.ftruncate(fd, size_bytes)
    # Do not use Python's mmap, because it would keep a duplicate of the descriptor.
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_size_t] * 6
    libc.mmap.restype = ctypes.c_size_t
    address = libc.mmap(0, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    view = memoryview((ctypes.c_int8 * size_bytes).from_address(address))
    found = descriptor_of(view)
    assert found is not None
    os.close(found)
    os.close(fd)
    assert descriptor_of(view) is None


def test_slots_give_the_descriptor_back_with_the_mapping(file: int) -> None:
    slots = EngineSlots("an engine", map_rows(file))
    assert slots.is_shared
    assert slots.region.covers(Region.of(slots.padded_view(SLOTS - 1, 4096)))
    assert slots.region.size_bytes == SLOTS * ROW_BYTES
    fd = slots.fd
    assert (os.fstat(fd).st_ino, fd != file) == (os.fstat(file).st_ino, True)
    slots.close()
    assert not slots.is_shared
    with pytest.raises(KVTierError, match="was released"):
        slots.fd  # noqa: B018
    with pytest.raises(OSError):
        os.fstat(fd)
