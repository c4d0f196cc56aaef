"""A tier for testing the conformance kit. Tests can inspect, disconnect and reconnect its store.

The tier behaves like a network tier: every call takes a moment. The store outlives an instance of
the tier, can be shared by several instances, and can be unreachable.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import ChunkTierManager
from kvtier_sdk.errors import (
    ChunkNotFoundError,
    ConfigError,
    TierCapacityError,
    TierUnavailableError,
)
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.options.tier import RunnerOptions, TierConfig
from kvtier_sdk.options.units import Seconds
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability, Entry, OffloadKey, Transfer, Usage

#: The name of a chunk on a shelf: the namespace's fingerprint and the key.
ShelfName = tuple[str, OffloadKey]


class Files(MutableMapping[ShelfName, bytes]):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, name: ShelfName) -> bytes:
        try:
            return self._file(name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: ShelfName, stored: bytes) -> None:
        self._file(name).write_bytes(stored)

    def __delitem__(self, name: ShelfName) -> None:
        self._file(name).unlink()

    def __iter__(self) -> Iterator[ShelfName]:
        for file in self._directory.iterdir():
            fingerprint, _, key = file.name.partition("-")
            yield fingerprint, bytes.fromhex(key)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, name: ShelfName) -> Path:
        return self._directory / f"{name[0]}-{name[1].hex()}"


@dataclass
class Shelf:
    """A store in this process that several instances of a tier can share."""

    objects: MutableMapping[ShelfName, bytes] = field(default_factory=dict)
    keys: dict[ShelfName, OffloadKey] = field(default_factory=dict)
    lengths: dict[ShelfName, int] = field(default_factory=dict)  # the lengths of intact objects
    connected: bool = True
    hangs: bool = False  # true makes calls hang
    torn: set[ShelfName] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)  # messages between the instances of a tier
    manifests: dict[str, bytes] = field(default_factory=dict)
    used_s: dict[ShelfName, float] = field(default_factory=dict)
    stored_s: dict[ShelfName, float] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str) -> Shelf:
        if name not in SHELVES:
            SHELVES[name] = cls(Files(Path(name)) if "/" in name else {})
        return SHELVES[name]


SHELVES: dict[str, Shelf] = {}
_LOOK_S = 0.01


class ShelfTierConfig(TierConfig):
    shelf: str = "shelf"
    chunks: int | None = None
    latency_s: Seconds = 0.001
    ttl_s: Seconds | None = None
    max_age_s: Seconds | None = None
    nonsense: bool = False


class ShelfTier(ChunkTierManager):
    """A tier that fulfils the whole contract, and stores its chunks on a :class:`Shelf`."""

    config_model = ShelfTierConfig
    capabilities = ~Capability.NONE
    contract_version: ClassVar[int] = 1
    config: ShelfTierConfig

    async def open(self) -> None:
        if self.config.nonsense:
            raise ConfigError("option 'nonsense' cannot work")
        await self.reach()
        if not self.context.maintenance:
            self.write_manifest()

    async def contains_chunk(self, key: OffloadKey) -> bool:
        await self.reach()
        name = self.name_of(key)
        self.expire(name)
        return name in self.shelf.objects and name not in self.shelf.torn

    async def store_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        self.put(transfer.key, b"".join(transfer.buffers))

    async def load_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        transfer.fill(self.take(transfer.key))
        if not self.context.maintenance:
            self.use(transfer.key)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self.reach()
        for key in keys:
            self.shelf.objects.pop(self.name_of(key), None)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self.reach()

    async def scan(self) -> AsyncIterator[Entry]:
        await self.reach()
        for name, stored in list(self.shelf.objects.items()):
            key = self.shelf.keys.get(name)
            if key is not None and self.name_of(key) == name:
                yield Entry(key, len(stored), self.shelf.used_s[name])

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        await self.reach()
        for fingerprint, manifest in list(self.shelf.manifests.items()):
            yield StoredNamespace.read(fingerprint, manifest)

    async def usage(self) -> Usage:
        await self.reach()
        objects = self.shelf.objects
        return Usage(len(objects), sum(map(len, objects.values())), None)

    def write_manifest(self) -> None:
        namespace = self.context.namespace
        self.shelf.manifests[namespace.fingerprint] = namespace.manifest_json().encode()

    def use(self, key: OffloadKey) -> None:
        self.shelf.used_s[self.name_of(key)] = self.context.clock.wall_s()

    @property
    def shelf(self) -> Shelf:
        return Shelf.named(self.config.shelf)

    def name_of(self, key: OffloadKey) -> ShelfName:
        return self.context.namespace.fingerprint, key

    def put(self, key: OffloadKey, stored: bytes) -> None:
        objects, name = self.shelf.objects, self.name_of(key)
        room = self.config.chunks
        if room is not None and name not in objects and len(objects) >= room:
            raise TierCapacityError("the shelf is full")
        objects[name] = stored
        self.shelf.torn.discard(name)
        self.shelf.keys[name], self.shelf.lengths[name] = key, len(stored)
        self.shelf.stored_s[name] = self.context.clock.wall_s()
        self.use(key)

    def take(self, key: OffloadKey) -> bytes:
        self.expire(self.name_of(key))
        stored = self.shelf.objects.get(self.name_of(key))
        if stored is None:
            raise ChunkNotFoundError("no such chunk")
        if self.name_of(key) in self.shelf.torn:
            return self.mend(stored)
        return stored

    def expire(self, name: ShelfName) -> None:
        if self.is_expired(name):
            self.shelf.objects.pop(name, None)

    def is_expired(self, name: ShelfName) -> bool:
        now_s, shelf = self.context.clock.wall_s(), self.shelf
        since_s = (shelf.used_s.get(name, now_s), shelf.stored_s.get(name, now_s))
        limits_s = (self.config.ttl_s, self.config.max_age_s)
        return any(
            limit_s is not None and now_s >= start_s + limit_s
            for start_s, limit_s in zip(since_s, limits_s, strict=True)
        )

    def mend(self, stored: bytes) -> bytes:
        """Restore an object that has lost its second half. This class always raises instead."""
        raise ChunkNotFoundError("a part is lost")

    async def reach(self) -> None:
        await self.context.clock.sleep(self.config.latency_s)
        while self.shelf.hangs:
            await self.context.clock.sleep(_LOOK_S)
        if not self.shelf.connected:
            raise TierUnavailableError("the shelf is unreachable")


def shelf_subject(
    tier_class: type[ShelfTier], directory: Path | None = None, **settings: Any
) -> TierSubject:
    name = str(directory or uuid.uuid4().hex)
    shelf = Shelf.named(name)
    namespace = TierSubject.new_namespace()

    def spec(**options: Any) -> TierSpec:
        config = tier_class.config_model.model_validate({"shelf": name, **options})
        return TierSpec("under-test", "shelf", tier_class, config, RunnerOptions.model_validate({}))

    def write_raw(key: OffloadKey, data: bytes) -> None:
        shelf.objects[name_of(key)] = data

    subject = TierSubject(
        spec(),
        read_raw=lambda key: shelf.objects.get(name_of(key)),
        write_raw=write_raw,
        break_connection=lambda: setattr(shelf, "connected", False),
        restore_connection=lambda: setattr(shelf, "connected", True),
        freeze=lambda: setattr(shelf, "hangs", True),
        unfreeze=lambda: setattr(shelf, "hangs", False),
        lose_part=lambda key: shelf.torn.add(name_of(key)),
        bad_settings={"a setting that cannot work": spec(nonsense=True)},
        small_tier=lambda object_bytes: spec(chunks=10),
        short_lived_tier=lambda: spec(ttl_s=1.0),
        aging_tier=lambda: spec(max_age_s=2.0),
        namespace=namespace,
        **settings,
    )
    name_of = cast(ShelfTier, subject.make()).name_of
    return subject
