from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from kvtier_sdk.pool.mapped_region import MappedRegion


def test_a_shared_file_is_found_from_any_address_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a name"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        start = array.ctypes.data
        region = MappedRegion.at(start + 2 * mmap.PAGESIZE + 5)
        del array
    status = path.stat()
    file_id = status.st_dev, status.st_ino
    end = start + 3 * mmap.PAGESIZE
    assert region == MappedRegion(start, end, True, 0, file_id, str(path))


def test_memory_of_this_process_has_no_file() -> None:
    array = np.zeros(1 << 24, np.uint8)
    region = MappedRegion.at(array.ctypes.data)
    assert region is not None
    assert (region.is_shared, region.file) == (False, (os.makedev(0, 0), 0))


def test_nothing_is_mapped_at_zero() -> None:
    assert MappedRegion.at(0) is None
