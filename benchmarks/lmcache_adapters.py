"""MiB/s of LMCache's own L2 adapters for files and Redis, and of ours, in one run.

Usage, in LMCache's environment: python benchmarks/lmcache_adapters.py [--kib N] [--rounds N]

Each adapter is made by LMCache's factory over one L1 that is shared memory, and is called as its
controllers call it: one task of all objects, and a wait for the event descriptor. Each round
measures every adapter in turn; medians are printed, and the ratio to ours of the same store within
a round. Files are moved through the page cache, which is warm, and past it (disk). Ours checks
every byte; LMCache's own do not.
"""

from __future__ import annotations

import argparse
import hashlib
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.platform import consume_fd
from support.redis_server import Server

_OURS = {
    "type": "plugin",
    "module_path": "kvtier_sdk.integrations.lmcache",
    "class_name": "KVTierL2Adapter",
}
_PATIENCE_S = 120


def configurations(folder: Path, port: int) -> dict[str, dict[str, Any]]:
    """Return the adapters by their names in the table, ours first for each store."""
    url = f"file://{folder}/kvtier"
    return {
        "file: kvtier": {**_OURS, "adapter_params": {"url": f"{url}?direct_io=off"}},
        "file: kvtier, thread": {
            **_OURS,
            "adapter_params": {"url": f"{url}-thread?direct_io=off", "runner": "thread"},
        },
        "file: LMCache fs": {"type": "fs", "base_path": f"{folder}/fs"},
        "file: LMCache fs_native": {"type": "fs_native", "base_path": f"{folder}/fs_native"},
        "disk: kvtier": {**_OURS, "adapter_params": {"url": f"{url}-disk"}},
        "disk: LMCache fs_native": {
            "type": "fs_native",
            "base_path": f"{folder}/fs_native_disk",
            "use_odirect": True,
        },
        "redis: kvtier": {**_OURS, "adapter_params": {"url": f"redis://127.0.0.1:{port}/0"}},
        "redis: kvtier, thread": {
            **_OURS,
            "adapter_params": {"url": f"redis://127.0.0.1:{port}/1", "runner": "thread"},
        },
        "redis: LMCache resp": {"type": "resp", "host": "127.0.0.1", "port": port},
    }


def measured(submit: Callable[[], int], fd: int, take: Callable[[int], Any]) -> tuple[float, Any]:
    """Return a task's seconds and its result."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    begin_s = time.perf_counter()
    task, result = submit(), None
    while result is None:
        assert poller.poll(1000 * _PATIENCE_S), "the task does not end"
        consume_fd(fd)
        result = take(task)
    return time.perf_counter() - begin_s, result


def play(
    adapter: Any, keys: list[ObjectKey], objects: Sequence[Any], layout: MemoryLayoutDesc
) -> tuple[float, float]:
    """Store all objects and load them again; return the seconds of both."""
    marks = [key.chunk_hash for key in keys]
    for mark, held in zip(marks, objects, strict=True):
        held.raw_data[: len(mark)] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
    store_s, stored = measured(
        lambda: adapter.submit_store_task(keys, objects),
        adapter.get_store_event_fd(),
        lambda task: adapter.pop_completed_store_tasks().get(task),
    )
    assert stored.is_successful()
    for held in objects:
        held.raw_data.zero_()
    _, found = measured(
        lambda: adapter.submit_lookup_and_lock_task(keys, {0: layout}),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.query_lookup_and_lock_result,
    )
    load_s, loaded = measured(
        lambda: adapter.submit_load_task(keys, objects),
        adapter.get_load_event_fd(),
        adapter.query_load_result,
    )
    adapter.submit_unlock(keys)
    assert found.popcount() == loaded.popcount() == len(keys)
    assert all(bytes(o.byte_array[: len(m)]) == m for m, o in zip(marks, objects, strict=True))
    return store_s, load_s


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a redis-server; yields its port."""
    server = Server(folder)
    server.start()
    try:
        yield server.port
    finally:
        server.kill()


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kib", type=int, default=2048, help="length of an object (2048)")
    parser.add_argument("--mib", type=int, default=256, help="all objects of a task (256)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds beside a first one (5)")
    arguments = parser.parse_args()
    count = arguments.mib * 1024 // arguments.kib
    layout = MemoryLayoutDesc([torch.Size([arguments.kib, 512])], [torch.bfloat16])
    l1 = L1MemoryManager(L1MemoryManagerConfig((arguments.mib + 8) << 20, use_lazy=False))
    _, objects = l1.allocate(layout, count)
    rounds: dict[str, list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        redis_server(Path(name) / "redis") as port,
    ):
        adapters = {}
        for what, entry in configurations(Path(name), port).items():
            config = get_l2_adapter_config_class(entry["type"]).from_dict(entry)
            adapters[what] = create_l2_adapter(config, l1.get_l1_memory_desc())
        for number in range(arguments.rounds + 1):
            for what, adapter in adapters.items():
                names = (f"{what} {number} {n}".encode() for n in range(count))
                keys = [ObjectKey(hashlib.sha256(of).digest(), "model", 1) for of in names]
                seconds = play(adapter, keys, objects, layout)
                if number:
                    rounds.setdefault(what, []).append(seconds)
                for path in Path(name).glob("fs*/**/*.data"):
                    path.unlink()
        for adapter in adapters.values():
            adapter.close()
    l1.free(objects)
    l1.close()
    print(f"{count} objects of {arguments.kib} KiB, MiB/s (ratio to kvtier's in the same round)")
    for what, seconds in rounds.items():
        ours = rounds[f"{what.split(':')[0]}: kvtier"]
        cells = []
        for at, operation in enumerate(("store", "load")):
            rate = statistics.median(arguments.mib / of[at] for of in seconds)
            ratio = statistics.median(
                own[at] / of[at] for own, of in zip(ours, seconds, strict=True)
            )
            cells.append(f"{operation} {rate:6,.0f} ({ratio:.2f})")
        print(f"{what:24} {'   '.join(cells)}")


if __name__ == "__main__":
    main()
