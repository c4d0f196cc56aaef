"""LMCache's own storage manager with one of our tiers as its L2, in this process."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager

#: One object: keys and values, layers, tokens, features, in bfloat16.
SHAPE = (2, 4, 16, 64)
OBJECT_BYTES = 2 * 2 * 4 * 16 * 64
MODEL = "org/model-a"
_L1_BYTES = 64 << 20
_PATIENCE_S = 60.0


class Kind(NamedTuple):
    """The identity of objects, beside their tokens.

    Attributes:
        model: LMCache's name of the model.
        dtype: of the objects' one tensor.
        world_size: workers of the model; rank 0's objects are meant.
        salt: the tenant's.
    """

    model: str = MODEL
    dtype: str = "bfloat16"
    world_size: int = 1
    salt: str = ""

    @property
    def layout(self) -> MemoryLayoutDesc:
        return MemoryLayoutDesc([torch.Size(SHAPE)], [getattr(torch, self.dtype)])

    def keys(self, chunks: Iterable[int]) -> list[ObjectKey]:
        """Return the keys of a prompt's chunks, which hash alike for every kind."""
        rank = ObjectKey.ComputeKVRank(self.world_size, 0, self.world_size, 0)
        return [
            ObjectKey(hashlib.sha256(b"%d" % n).digest(), self.model, rank, 0, self.salt)
            for n in chunks
        ]

    def content(self, chunk: int) -> torch.Tensor:
        """Return the bytes of an object."""
        seed = hashlib.sha256(repr((self, chunk)).encode()).digest()[:6]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        size = OBJECT_BYTES // 2 * getattr(torch, self.dtype).itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


KIND = Kind()


class Found(NamedTuple):
    """The result of a prefetch.

    Attributes:
        hits: how many of the prompt's first chunks.
        equal: how many of them had the bytes that were stored.
    """

    hits: int
    equal: int


class Host:
    """A storage manager of LMCache.

    Attributes:
        manager: LMCache's.
        adapter: our adapter, which its plugin loader has made.
    """

    def __init__(self, manager: StorageManager) -> None:
        self.manager = manager
        self._offered = 0
        ((_, self.adapter),) = manager.l2_adapters()

    def store(self, chunks: Sequence[int], kind: Kind = KIND) -> None:
        """Write objects into L1, and wait until LMCache has stored them or given up."""
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
        """Prefetch a prompt as LMCache's server does, and compare what came."""
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
        """Empty L1."""
        self.manager.clear()

    def count(self, counter: str) -> int:
        """Return a counter of the tier, of all models together."""
        return sum(getattr(stats, counter) for stats in self.adapter.stats_now())

    def reasons(self, counter: str) -> dict[str, int]:
        """Return a counter of the tier with its reasons, of all models together."""
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
def hosted(url: str, *, shm_name: str | None = None, **params: Any) -> Iterator[Host]:
    """Make a storage manager from a command line of LMCache's, and close it at the end.

    Args:
        url: the tier's.
        shm_name: LMCache's; empty for an L1 that no other process can map.
        params: further ``adapter_params``.
    """
    adapter = {
        "type": "plugin",
        "module_path": "kvtier_sdk.integrations.lmcache",
        "class_name": "KVTierL2Adapter",
        "config_class_name": "KVTierL2AdapterConfig",
        "adapter_params": {"url": url, **params},
    }
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    arguments = parser.parse_args(["--l2-adapter", json.dumps(adapter)])
    named = {} if shm_name is None else {"shm_name": shm_name}
    manager = StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(L1MemoryManagerConfig(_L1_BYTES, use_lazy=False, **named)),
            EvictionConfig("LRU"),
            l2_adapter_config=parse_args_to_l2_adapters_config(arguments),
        )
    )
    try:
        yield Host(manager)
    finally:
        manager.close()


def stored_elsewhere(url: str, chunks: Sequence[int], kind: Kind) -> int:
    """Store a prompt in a storage manager of this process; for another process to call.

    Returns:
        How many chunks the tier counts as stored.
    """
    with hosted(url) as host:
        host.store(chunks, kind)
        return host.count("stored_chunks")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.002)
