"""Mooncake: the tier, and its client's plain calls."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncake.store import MooncakeDistributedStore
from support.mooncake_store import MooncakeStore

from kvtier_sdk import Region
from ways.sockets import in_threads
from ways.tier_way import TierWay
from ways.way import Subject, Way, Work

Slots = list[list[memoryview]]


class PlainClient(Way):
    """Batches of payloads, without headers, from and into the same slots, in threads."""

    name = "one buffer"

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
        """Store a batch; return true if all is stored."""
        payloads = [Region.of(payload) for _, payload in slots]
        statuses = self._client.batch_put_from(names, *map(list, zip(*payloads, strict=True)))
        return set(statuses) == {0}

    def get(self, names: list[str], slots: Slots) -> bool:
        """Load a batch; return true if all is loaded."""
        payloads = [Region.of(payload) for _, payload in slots]
        lengths = self._client.batch_get_into(names, *map(list, zip(*payloads, strict=True)))
        return set(lengths) == {self.work.chunk_bytes}

    def _each(self, move: Callable[[list[str], Slots], bool]) -> None:
        work, step = self.work, self.work.batch_chunks
        starts = iter(range(0, work.chunks, step))

        def lane(slots: Slots) -> None:
            for start in starts:
                numbers = range(start, min(start + step, work.chunks))
                names = [f"plain{number % work.keys:020}" for number in numbers]
                if not move(names, slots[: len(names)]):
                    raise SystemExit("failed: a batch was not moved")

        in_threads(lane, work.lanes())


class TwoBuffers(PlainClient):
    """The calls that the tier makes: header and payload, as one object."""

    name = "two buffers"

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
    """A dedicated master and node on the loopback."""

    name = "mooncake"
    limit = PlainClient.name

    def __init__(self, root: Path | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-")
        self._store = MooncakeStore(Path(self._directory.name), segment_bytes=2**30)

    def __enter__(self) -> MooncakeSubject:
        self._store.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._store.kill()
        self._directory.cleanup()

    def clear(self) -> None:
        self._store.nodes[0].ask("remove_all", True)

    def ways(self, work: Work) -> Sequence[Way]:
        port = self._store.port
        return [TierWay(work, url=self._store.url), PlainClient(work, port), TwoBuffers(work, port)]
