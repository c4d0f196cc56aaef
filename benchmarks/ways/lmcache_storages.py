"""LMCache's and kvtier's L2 adapters, below an L1 set up with LMCache's options."""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import select
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.multiprocess.config import add_mp_server_args
from lmcache.v1.platform import consume_fd
from support.redis_server import Server

from ways.compiled_files import CompiledFiles, batch_io
from ways.storage import Storage

_OBJECT_BYTES = 2 << 20
_LAYOUT = MemoryLayoutDesc([torch.Size([_OBJECT_BYTES // 1024, 512])], [torch.bfloat16])
_PATIENCE_S = 120
# The header's length in a tier whose files bypass the page cache.
_HEADER_BYTES = 4096
_UNDIGESTED = "kvtier, no digests"


def _ours(url: str) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvtier_lmcache",
        "class_name": "KVTierL2Adapter",
        "adapter_params": {"url": url.replace(" ", "%20")},
    }


def _adapters(folder: Path, port: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return each adapter's configuration, by group and name."""
    files, redis = folder / "file", f"redis://127.0.0.1:{port}"
    cached = "?direct_io=off"
    return {
        "file": {
            "kvtier": _ours(f"file://{files}/kvtier{cached}"),
            _UNDIGESTED: _ours(f"file://{files}/{_UNDIGESTED}{cached}"),
            "fs": {"type": "fs", "base_path": f"{files}/fs"},
            "fs_native": {"type": "fs_native", "base_path": f"{files}/fs_native"},
        },
        "disk": {
            "kvtier": _ours(f"file://{folder}/disk/kvtier"),
            _UNDIGESTED: _ours(f"file://{folder}/disk/{_UNDIGESTED}"),
            "fs_native": {
                "type": "fs_native",
                "base_path": f"{folder}/disk/fs_native",
                "use_odirect": True,
            },
        },
        "redis": {
            "kvtier": _ours(f"{redis}/1"),
            "resp": {"type": "resp", "host": "127.0.0.1", "port": port},
        },
    }


def storages(folder: Path, batch_bytes: int, stack: ExitStack) -> dict[str, dict[str, Storage]]:
    parser = add_mp_server_args(add_storage_manager_args(argparse.ArgumentParser()))
    size_gb = (batch_bytes + (8 << 20)) / 2**30
    command = f"--l1-size-gb {size_gb} --eviction-policy LRU --no-l1-use-lazy --shm-name"
    config = parse_args_to_config(parser.parse_args([*command.split(), f"bench-{os.getpid()}"]))
    l1 = L1MemoryManager(config.l1_manager_config.memory_config)
    stack.callback(l1.close)
    _, objects = l1.allocate(_LAYOUT, batch_bytes // _OBJECT_BYTES)
    stack.callback(l1.free, objects)
    server = Server(folder / "server")
    server.start()
    stack.callback(server.kill)
    made: dict[str, dict[str, Storage]] = {}
    for group, entries in _adapters(folder, server.port).items():
        clear = (lambda: server.ask("FLUSHALL")) if group == "redis" else (lambda: None)
        for way, entry in entries.items():
            parsed = get_l2_adapter_config_class(entry["type"]).from_dict(entry)
            adapter = create_l2_adapter(parsed, l1.get_l1_memory_desc())
            stack.callback(adapter.close)
            if way == _UNDIGESTED:
                # No option turns digests off, so change the spec before the adapter opens its
                # tiers.
                adapter._spec = replace(adapter._spec, verify=False)
            storage = _Adapter(f"{group} {way}", adapter, objects, clear)
            made.setdefault(group, {})[way] = storage
    for group in ("file", "disk") if batch_io is not None else ():
        files = CompiledFiles(folder / group / "compiled part", direct=group == "disk")
        stack.callback(files.close)
        made[group]["compiled part"] = _Limit(files, objects)
    return made


class _L1Storage(Storage):
    object_bytes = _OBJECT_BYTES

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects

    def parts(self) -> list[torch.Tensor]:
        return [held.raw_data[:_OBJECT_BYTES] for held in self._objects]


class _Limit(_L1Storage):
    """The limit: four threads that call the file tier's compiled code directly."""

    def __init__(self, files: CompiledFiles, objects: Sequence[Any]) -> None:
        super().__init__(objects)
        self._files = files
        self._threads = ThreadPoolExecutor(4)
        chunks = [
            (str(number), memoryview(mmap.mmap(-1, _HEADER_BYTES)), memoryview(part.numpy()))
            for number, part in enumerate(self.parts())
        ]
        self._batches = [chunks[start::4] for start in range(4)]

    def store(self, number: int) -> None:
        list(self._threads.map(self._files.store, self._batches))

    def load(self, number: int) -> None:
        list(self._threads.map(self._files.load, self._batches))


class _Adapter(_L1Storage):
    """An L2 adapter, called as LMCache's controllers call it. Each task has all objects."""

    def __init__(
        self, name: str, adapter: Any, objects: Sequence[Any], clear: Callable[[], object]
    ) -> None:
        super().__init__(objects)
        self._name = name
        self._adapter = adapter
        self._clear = clear

    def store(self, number: int) -> None:
        adapter = self._adapter
        stored = _result(
            adapter.submit_store_task(self._keys(number), self._objects),
            adapter.get_store_event_fd(),
            lambda task: adapter.pop_completed_store_tasks().get(task),
        )
        assert stored.is_successful()

    def find(self, number: int) -> None:
        adapter = self._adapter
        task = adapter.submit_lookup_and_lock_task(self._keys(number), {0: _LAYOUT})
        fd = adapter.get_lookup_and_lock_event_fd()
        found = _result(task, fd, adapter.query_lookup_and_lock_result)
        assert found.popcount() == len(self._objects)

    def load(self, number: int) -> None:
        adapter, keys = self._adapter, self._keys(number)
        task = adapter.submit_load_task(keys, self._objects)
        loaded = _result(task, adapter.get_load_event_fd(), adapter.query_load_result)
        adapter.submit_unlock(keys)
        assert loaded.popcount() == len(keys)

    def clear(self) -> None:
        self._clear()

    def _keys(self, number: int) -> list[ObjectKey]:
        names = (f"{self._name} {number} {n}".encode() for n in range(len(self._objects)))
        return [ObjectKey(hashlib.sha256(name).digest(), "model", 1) for name in names]


def _result(task: int, fd: int, take: Callable[[int], Any]) -> Any:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    result = None
    while result is None:
        assert poller.poll(1000 * _PATIENCE_S), "the task does not end"
        consume_fd(fd)
        result = take(task)
    return result
