"""LMCache's own storage manager in this process, with a kvtier tier as its L2."""

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.config import add_mp_server_args
from support.lmcache_server import wait_until

#: The shape of an object: keys and values, layers, tokens, features.
SHAPE = (2, 4, 16, 64)
OBJECT_BYTES = 2 * 2 * 4 * 16 * 64
MODEL = "org/model-a"
_L1_GB = 0.0625
_numbers = itertools.count()


class Kind(NamedTuple):
    model: str = MODEL
    dtype: str = "bfloat16"
    world_size: int = 1
    salt: str = ""

    @property
    def layout(self) -> MemoryLayoutDesc:
        return MemoryLayoutDesc([torch.Size(SHAPE)], [getattr(torch, self.dtype)])

    def keys(self, chunks: Iterable[int]) -> list[ObjectKey]:
        rank = ObjectKey.ComputeKVRank(self.world_size, 0, self.world_size, 0)
        return [
            ObjectKey(hashlib.sha256(b"%d" % n).digest(), self.model, rank, 0, self.salt)
            for n in chunks
        ]

    def content(self, chunk: int) -> torch.Tensor:
        seed = hashlib.sha256(repr((self, chunk)).encode()).digest()[:6]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        bits = torch.randint(0, 256, (OBJECT_BYTES // 2,), dtype=torch.uint8, generator=generator)
        # Clear the highest bit of each exponent, so that no number is a NaN.
        numbers = (bits & 0b1011_1111).view(torch.float8_e4m3fn)
        return numbers.to(getattr(torch, self.dtype)).view(torch.uint8)


KIND = Kind()


class Found(NamedTuple):
    hits: int
    equal: int


class Host:
    def __init__(self, manager: StorageManager) -> None:
        self.manager = manager
        self._offered = 0
        ((_, adapter),) = manager.l2_adapters()
        # Unwrap the adapter, because LMCache wraps an adapter that has a serializer.
        self.adapter: Any = getattr(adapter, "inner_adapter", adapter)

    def store(self, chunks: Sequence[int], kind: Kind = KIND) -> None:
        keys = kind.keys(chunks)
        objects = self.manager.reserve_write(keys, kind.layout)
        assert len(objects) == len(keys)
        for chunk, key in zip(chunks, keys, strict=True):
            objects[key].raw_data.view(torch.uint8)[: len(kind.content(chunk))] = kind.content(
                chunk
            )
        self._offered += len(keys)
        self.manager.finish_write(keys)
        wait_until(self._is_stored, "the store controller to be idle")

    def load(self, chunks: Sequence[int], kind: Kind = KIND) -> Found:
        keys = kind.keys(chunks)
        row = GroupedObjectKeys(keys, 0, kind.layout, -1)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([row]))
        results: list[Any] = []

        def has_ended() -> bool:
            results.append(self.manager.query_prefetch_status(handle))
            return results[-1] is not None

        wait_until(has_ended, "the prefetch to end")
        (cells,) = results[-1].hit_cells
        hits = cells.get_indices_list()
        equal = 0
        if hits:
            found = [keys[index] for index in hits]
            with self.manager.read_prefetched_results(found) as objects:
                assert objects is not None
                for index, held in zip(hits, objects, strict=True):
                    equal += torch.equal(
                        held.raw_data.view(torch.uint8)[: held.get_size()],
                        kind.content(chunks[index]),
                    )
            self.manager.finish_read_prefetched(found)
        return Found(len(hits), equal)

    def forget(self) -> None:
        self.manager.clear()

    def count(self, counter: str) -> int:
        return sum(getattr(stats, counter) for stats in self.adapter.stats_now())

    def reasons(self, counter: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for stats in self.adapter.stats_now():
            for reason, count in getattr(stats, counter).items():
                found[reason] = found.get(reason, 0) + count
        return found

    def _is_stored(self) -> bool:
        ended = self.count("stored_chunks")
        for counter in ("failures", "dropped"):
            reasons = self.reasons(counter).items()
            ended += sum(count for reason, count in reasons if reason.startswith("store."))
        status = self.manager._store_controller.report_status()
        return ended >= self._offered and not status["in_flight_task_count"]


@contextmanager
def hosted(
    url: str, *, shared: bool = True, serde: dict[str, str] | None = None, **params: Any
) -> Iterator[Host]:
    adapter = {
        "type": "plugin",
        "module_path": "kvtier_lmcache",
        "class_name": "KVTierL2Adapter",
        "config_class_name": "KVTierL2AdapterConfig",
        "adapter_params": {"url": url, **params},
        **({"serde": serde} if serde else {}),
    }
    parser = add_mp_server_args(add_storage_manager_args(argparse.ArgumentParser()))
    command = ["--l1-size-gb", str(_L1_GB), "--eviction-policy", "LRU"]
    if shared:
        name = f"kvtier-test-{os.getpid()}-{next(_numbers)}"
        command += ["--no-l1-use-lazy", "--shm-name", name]
    command += ["--l2-adapter", json.dumps(adapter)]
    manager = StorageManager(parse_args_to_config(parser.parse_args(command)))
    try:
        yield Host(manager)
    finally:
        manager.close()


def stored_elsewhere(url: str, chunks: Sequence[int], kind: Kind, **options: Any) -> int:
    with hosted(url, **options) as host:
        host.store(chunks, kind)
        return host.count("stored_chunks")


def deleted_elsewhere(url: str, chunks: Sequence[int], kind: Kind) -> None:
    with hosted(url) as host:
        host.load(chunks, kind)
        host.adapter.delete(kind.keys(chunks))
