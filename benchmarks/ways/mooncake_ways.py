"""The ways to measure Mooncake: the tier, and direct calls to Mooncake's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mooncake.store import MooncakeDistributedStore
from support.mooncake_store import MooncakeStore

from kvtier_sdk import Region
from ways.tier_way import TierWay
from ways.way import Subject, Way, Work

Slots = list[list[memoryview]]


class PlainClient(Way):
    """Mooncake's client, called from threads with batches of payloads without headers."""

    def __init__(self, work: Work, port: int) -> None:
        super().__init__(work)
        self._port = port

    async def open(self) -> None:
        self._client = MooncakeDistributedStore()
        master = f"127.0.0.1:{self._port}"
        self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        for region in self.work.regions:
            self._client.register_buffer(*region)

    async def close(self) -> None:
        self._client.remove_by_regex("^plain", True)
        self._client.close()

    async def store(self) -> None:
        self._each(self.put)

    async def load(self) -> None:
        self._each(self.get)

    def put(self, names: list[str], slots: Slots) -> bool:
        """Store a batch; return true if every object was stored."""
        payloads = [Region.of(payload) for _, payload in slots]
        statuses = self._client.batch_put_from(names, *map(list, zip(*payloads, strict=True)))
        return set(statuses) == {0}

    def get(self, names: list[str], slots: Slots) -> bool:
        """Load a batch; return true if every object was loaded."""
        payloads = [Region.of(payload) for _, payload in slots]
        lengths = self._client.batch_get_into(names, *map(list, zip(*payloads, strict=True)))
        return set(lengths) == {self.work.chunk_bytes}

    def _each(self, move: Callable[[list[str], Slots], bool]) -> None:
        def lane(rest: Iterator[range]) -> None:
            for numbers in rest:
                names = [f"plain{number:020}" for number in numbers]
                if not move(names, [self.work.slots[number] for number in numbers]):
                    raise SystemExit("failed: a batch was not moved")

        self.work.in_threads(lane, self.work.batches())


class TwoBuffers(PlainClient):
    """Mooncake's client, called as the tier calls it, with each chunk's header and payload."""

    def put(self, names: list[str], slots: Slots) -> bool:
        return set(self._client.batch_put_from_multi_buffers(names, *_places(slots))) == {0}

    def get(self, names: list[str], slots: Slots) -> bool:
        lengths = self._client.batch_get_into_multi_buffers(names, *_places(slots))
        return set(lengths) == {self.work.object_bytes}


def _places(slots: Slots) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses and the lengths of all buffers."""
    regions = [[Region.of(buffer) for buffer in buffers] for buffers in slots]
    return (
        [[region.address for region in both] for both in regions],
        [[region.size_bytes for region in both] for both in regions],
    )


class MooncakeSubject(Subject):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._store = MooncakeStore(self.directory, segment_bytes=2**30).start()
        self.opened.callback(self._store.kill)
        self.url = self._store.url

    def clear(self) -> None:
        self._store.nodes[0].ask("remove_all", True)

    def ways(self, work: Work) -> Mapping[str, Callable[[int], Way]]:
        port = self._store.port
        return {
            "kvtier": lambda number: TierWay(work, url=self.url),
            "two buffers": lambda number: TwoBuffers(work, port),
            "one buffer": lambda number: PlainClient(work, port),
        }
