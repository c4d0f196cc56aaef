"""Runs LMCache's own tests of its storage with kvtier's adapter in place of LMCache's mock.

Usage: python -m lmcache_own_tests SOURCES [--url URL] [PYTEST-OPTION ...]

``SOURCES`` is the unpacked source distribution of the LMCache version that is installed. This
project contains no copy of it. Where the tests construct a ``MockL2Adapter``, they get kvtier's
adapter. This adapter also has the mock's methods that tell which objects were stored.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

#: LMCache's test files that use a MockL2Adapter, below ``tests/v1/distributed``.
FILES = (
    "test_mock_l2_adapter.py",
    "test_store_controller.py",
    "test_runtime_adapters.py",
    "test_distributed_storage_manager.py",
    "test_cache_salt_l2_eviction.py",
    "test_l1_l2_state_metrics.py",
    "test_report_status.py",
    "test_multimodel.py",
    "serde/test_serde_e2e.py",
)
_URL = "KVTIER_LMCACHE_URL"
_PAGE_BYTES = 4096
_ARENA_BYTES = 64 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, help="LMCache's sources, unpacked")
    parser.add_argument(
        "--url",
        default="file://{}?min_free=0&capacity=64MiB",
        help="the tier, {} for a new directory (%(default)s)",
    )
    arguments, options = parser.parse_known_args()
    tests = arguments.sources / "tests"
    files = [str(tests / "v1" / "distributed" / name) for name in FILES]
    if missing := [name for name in files if not os.path.exists(name)]:
        parser.error(f"no {missing[0]}")
    command = [sys.executable, "-m", "pytest", "-p", __spec__.name, "-c", os.devnull]
    # Leave LMCache's conftest out, because it imports GPU packages.
    command += ["--noconftest", "--rootdir", str(tests), "-rfE", "--tb", "line", *options, *files]
    variables = {**os.environ, _URL: arguments.url}
    return subprocess.run(command, env=variables, check=False).returncode


def pytest_configure() -> None:
    if _URL not in os.environ:
        return
    import torch
    from lmcache import torch_dev
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.l2_adapters import mock_l2_adapter
    from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    from kvtier_lmcache import KVTierL2Adapter, KVTierL2AdapterConfig

    arena = torch.zeros(_ARENA_BYTES + _PAGE_BYTES, dtype=torch.uint8)
    begin = -arena.data_ptr() % _PAGE_BYTES
    places = itertools.cycle(range(begin, _ARENA_BYTES, 1 << 16))
    make_manager = L1MemoryManager.__init__

    def note(self: Any, *args: Any, **options: Any) -> None:
        make_manager(self, *args, **options)
        _managers.append(self)

    L1MemoryManager.__init__ = note

    class Substitute(KVTierL2Adapter):
        def __init__(self, config: object = None) -> None:
            memory = L1MemoryDesc(arena.data_ptr() + begin, _ARENA_BYTES, _PAGE_BYTES)
            if _managers:
                memory = _managers[-1].get_l1_memory_desc()
            url = os.environ[_URL].format(tempfile.mkdtemp())
            self._stored: set[Any] = set()
            super().__init__(KVTierL2AdapterConfig.from_dict({"url": url}), memory)

        def _notify_keys_stored(self, keys: Any, sizes: Any) -> None:
            self._stored.update(keys)
            super()._notify_keys_stored(keys, sizes)

        def _notify_keys_deleted(self, keys: Any, sizes: Any) -> None:
            self._stored.difference_update(keys)
            super()._notify_keys_deleted(keys, sizes)

        def debug_has_key(self, key: Any) -> bool:
            return key in self._stored

        def debug_get_stored_object_count(self) -> int:
            return len(self._stored)

        def report_status(self) -> dict[str, Any]:
            return {**super().report_status(), "stored_object_count": len(self._stored)}

    def object_in_arena(size: int = 1024, fill_value: float = 1.0) -> TensorMemoryObj:
        start = next(places)
        raw = arena[start : start + size * 4].view(torch.float32)
        raw.fill_(fill_value)
        shape = torch.Size([size])
        metadata = MemoryObjMetadata(
            shape,
            torch.float32,
            start - begin,
            size * 4,
            1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[shape],
            dtypes=[torch.float32],
        )
        return TensorMemoryObj(raw, metadata, parent_allocator=None)

    mock_l2_adapter.MockL2Adapter = Substitute
    _replaced.update(
        create_memory_obj=object_in_arena,
        _memory_obj=lambda n_floats=128: object_in_arena(n_floats),
    )
    # Pretend that there is a device, or the test modules would be skipped. They use no device.
    torch_dev.is_available = lambda: True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for name, function in _replaced.items():
            if hasattr(module, name):
                setattr(module, name, function)


def pytest_runtest_setup() -> None:
    _managers.clear()


_managers: list[Any] = []
_replaced: dict[str, Any] = {}

if __name__ == "__main__":
    sys.exit(main())
