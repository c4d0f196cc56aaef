from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.keys import OURS, THEIRS, write_keys
from support.one_job import OneJobLoop
from support.promises import fault_of_regions

from kvtier_sdk import (
    Capability,
    HostPool,
    JobResult,
    MemoryTier,
    Namespace,
    OffloadKey,
    Operation,
    TierError,
    Transfer,
)
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.runner import sealing
from kvtier_sdk.runner.jobs import IoEnded

CHUNK_BYTES = 200
ENVELOPE_BYTES = 48
LOAD, STORE = Operation.LOAD, Operation.STORE
A, B = b"a" * 36, b"b" * 36


class SharedStore(MemoryTier):
    """A tier whose chunks are shared by all loops of a test."""

    alignment = 16
    objects: dict[str, dict[OffloadKey, bytearray]]
    deleted: list[OffloadKey]
    capabilities = Capability.DELETE

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        assert fault_of_regions(self.context, batch) is None
        for transfer in batch:
            if transfer.replace or transfer.key not in self._own():
                self._own()[transfer.key] = bytearray(b"".join(transfer.buffers))
        return [None] * len(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        assert fault_of_regions(self.context, batch) is None
        for transfer in batch:
            split = len(transfer.header)
            stored = self._own()[transfer.key]
            transfer.header[:], transfer.payload[:] = stored[:split], stored[split:]
        return [None] * len(batch)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self._own()[key]
            self.deleted.append(key)

    def _own(self) -> dict[OffloadKey, bytearray]:
        return self.objects.setdefault(self.context.namespace.fingerprint, {})


class Engine(OneJobLoop):
    tier: SharedStore

    def __init__(
        self, codec: str, objects: dict[str, dict[OffloadKey, bytearray]], model: str
    ) -> None:
        self.namespace = Namespace({"model": model})
        # A limit of one byte puts each chunk into its own batch.
        url = f"memory:?codec={codec}&max_batch=1"
        super().__init__(url, SharedStore, self.namespace, HostPool(8, CHUNK_BYTES))
        self.tier.objects, self.tier.deleted = objects, []

    async def do(self, operation: Operation, key: OffloadKey, slot: int = 0) -> str:
        return (await self.result_of(operation, key, slot)).verdicts[0].value

    @property
    def objects(self) -> dict[OffloadKey, bytearray]:
        return self.tier.objects[self.tier.context.namespace.fingerprint]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Engine]:
    objects: dict[str, dict[OffloadKey, bytearray]] = {}

    def build(*keys: bytes, model: str = "m") -> Engine:
        path = tmp_path / f"{b''.join(keys)[::32].hex()}.keys"
        return Engine(write_keys(path, *keys), objects, model)

    return build


Make = Callable[..., Engine]
CONTENT = bytes(range(200))


async def stored(engine: Engine, *keys: OffloadKey) -> None:
    await engine.loop.open()
    for key in keys or (A,):
        engine.pool.view(0)[:] = CONTENT
        assert await engine.do(STORE, key) == "ok"


async def test_the_tier_sees_a_sealed_chunk_of_the_announced_length(make: Make) -> None:
    engine = make(OURS)
    await stored(engine)
    (found,) = engine.objects.values()
    context = engine.tier.context
    assert context.header_bytes == 64 + ENVELOPE_BYTES
    assert len(found) == context.object_bytes == 112 + 208
    assert CONTENT[:16] not in found
    assert found[40:56] == bytes(16), "a digest would tell two equal chunks apart from others"
    plain = engine.namespace.for_chunks(CHUNK_BYTES)
    assert context.namespace.differences(plain.manifest) == {"codec": ("aes-gcm", None)}
    assert engine.pool.view(0) == CONTENT
    assert await engine.do(LOAD, A, 1) == "ok"
    assert engine.pool.view(1) == CONTENT
    await engine.loop.close()


async def test_every_byte_of_a_stored_chunk_is_guarded(make: Make) -> None:
    engine = make(OURS)
    await stored(engine)
    whole = bytes(engine.objects[A])
    verdicts = []
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        engine.objects[A] = damaged
        engine.pool.view(1)[:] = bytes(CHUNK_BYTES)
        verdicts.append(await engine.do(LOAD, A, 1))
        assert (A in engine.objects) == (64 <= at < 72), "only an unknown key's chunk stays"
    assert verdicts[:64] == ["corrupt"] * 64
    assert set(verdicts[64:]) == {"auth"}


@pytest.mark.parametrize("rebinds", [False, True])
async def test_a_chunk_moved_to_another_key_is_refused(make: Make, rebinds: bool) -> None:
    engine = make(OURS)
    await stored(engine, A, B)
    moved = bytearray(engine.objects[A])
    if rebinds:  # an attacker can copy the other chunk's header
        moved[:64] = engine.objects[B][:64]
    engine.objects[B] = moved
    assert await engine.do(LOAD, B) == ("auth" if rebinds else "corrupt")
    assert await engine.do(LOAD, A) == "ok"
    assert engine.tier.deleted == [B]


async def test_a_chunk_moved_to_another_model_is_refused(make: Make) -> None:
    engine, other = make(OURS), make(OURS, model="another")
    await stored(engine)
    await other.loop.open()
    moved = bytearray(engine.objects[A])
    # An attacker who knows the format can write a matching header.
    fingerprint = other.tier.context.namespace.fingerprint
    header = ChunkHeader(fingerprint, CHUNK_BYTES, SharedStore.alignment, sealed=True)
    header.seal(A, memoryview(rebound := bytearray(112)), memoryview(bytes(208)))
    moved[:64] = rebound[:64]
    other.tier._own()[A] = moved
    assert await other.do(LOAD, A) == "auth"


async def test_a_planted_plain_chunk_is_refused(make: Make) -> None:
    engine = make(OURS)
    await stored(engine)
    planted = bytearray(len(engine.objects[A]))
    fingerprint = engine.tier.context.namespace.fingerprint
    header, payload = memoryview(planted)[:112], memoryview(planted)[112:]
    ChunkHeader(fingerprint, CHUNK_BYTES).seal(A, header, payload)
    engine.objects[A] = planted
    assert await engine.do(LOAD, A) == "auth"
    assert engine.tier.deleted == [A]


async def test_engines_with_different_keys_do_not_fight(make: Make) -> None:
    ours, theirs = make(OURS), make(THEIRS)
    await stored(ours)
    await theirs.loop.open()
    for engine in (ours, theirs):
        engine.pool.view(0)[:] = CONTENT
    history = [
        (await engine.do(LOAD, A, 1), await engine.do(STORE, A)) for engine in 3 * [theirs, ours]
    ]
    replaced, served, left = ("auth", "ok"), ("ok", "ok"), ("auth", "auth")
    assert history == [replaced, replaced, left, served, left, served]
    assert ours.tier.deleted == theirs.tier.deleted == []


async def test_a_cancelled_job_ends_after_its_thread(make: Make) -> None:
    engine = make(OURS)
    await stored(engine)
    opening, go_on = threading.Event(), threading.Event()
    sealer = engine.loop._mover._sealer
    assert sealer is not None
    real = sealer._codec.open

    def slow(*arguments: object) -> None:
        opening.set()
        go_on.wait(30)
        real(*arguments)  # type: ignore[arg-type]

    sealer._codec.open = slow  # type: ignore[method-assign, assignment]
    job = engine.job(LOAD, A, 1)
    engine.loop.submit([job])
    while not opening.is_set():
        await asyncio.sleep(0.001)
    engine.loop.abandon()
    for _ in range(20):
        await asyncio.sleep(0.001)
    result = engine.reports[-1]
    assert isinstance(result, JobResult)
    assert (result.verdicts[0].value, result.released) == ("cancelled", False)
    go_on.set()
    while not isinstance(engine.reports[-1], IoEnded):
        await asyncio.sleep(0.001)
    assert len(sealer._scratch._free) == 1, "the buffer came back"


async def test_the_loop_goes_on_while_a_chunk_is_sealed(make: Make) -> None:
    engine = make(OURS)
    await engine.loop.open()
    sealer = engine.loop._mover._sealer
    assert sealer is not None
    went_on = threading.Event()

    def waits(*arguments: object) -> None:
        assert went_on.wait(30)

    sealer._codec.seal = waits  # type: ignore[method-assign, assignment]
    job = asyncio.ensure_future(engine.do(STORE, A))
    await asyncio.sleep(0.01)
    went_on.set()
    assert await job == "ok"


async def test_foreign_chunks_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_MAX_FOREIGN", 1)
    await stored(make(OURS), A, B)
    theirs = make(THEIRS)
    await theirs.loop.open()
    for key in (A, B):
        assert await theirs.do(LOAD, key) == "auth"
    assert theirs.loop._mover._sealer is not None
    assert list(theirs.loop._mover._sealer._foreign) == [B]
