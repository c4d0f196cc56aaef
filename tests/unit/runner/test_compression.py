from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from support.filled import floats
from support.keys import OURS, write_keys
from support.one_job import OneJobLoop

from kvtier_sdk import (
    ConfigError,
    HostPool,
    MemoryTier,
    Namespace,
    OffloadKey,
    Operation,
    TierError,
    Transfer,
)
from kvtier_sdk.codecs import planes
from kvtier_sdk.codecs.planes import Float8

CHUNK_BYTES = 20_000
LOAD, STORE = Operation.LOAD, Operation.STORE
KEY = b"k" * 36
FACTS = {"model": "m", "dtype": "bfloat16"}


class Aligned(MemoryTier):
    alignment = 512


class FixedLength(MemoryTier):
    fixed_length = True


class Slow(Aligned):
    async def store(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        await asyncio.sleep(sum(transfer.object_bytes for transfer in batch) * 2e-6)
        return await super().store(batch)


class Engine(OneJobLoop):
    async def do(self, operation: Operation) -> str:
        result = await self.result_of(operation, KEY)
        self.object_bytes, self.coding_s = result.object_bytes, result.coding_s
        self.is_compressed = bool(result.compressed_chunks)
        return result.verdicts[0].value

    @property
    def objects(self) -> dict[OffloadKey, np.ndarray]:
        return self.tier._objects


Make = Callable[..., Engine]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:
        tiers: list[MemoryTier] = []

        async def build(
            *options: str, tier_class: type[MemoryTier] = Aligned, dtype: str = "bfloat16"
        ) -> Engine:
            url, pool = "memory:?" + "&".join(options), HostPool(1, CHUNK_BYTES)
            engine = Engine(url, tier_class, Namespace({**FACTS, "dtype": dtype}), pool)
            stack.push_async_callback(engine.loop.close)
            await engine.loop.open()
            tiers.append(engine.tier)
            engine.tier._objects = tiers[0]._objects
            return engine

        yield build  # type: ignore[misc]


def numbers(seed: int = 0) -> bytes:
    return floats(bytes([seed]), CHUNK_BYTES)


async def test_a_chunk_is_stored_in_fewer_bytes_and_every_engine_reads_it(make: Make) -> None:
    engine, plain = await make("compress=always"), await make()
    engine.pool.view(0)[:] = numbers()
    assert await engine.do(STORE) == "ok"
    assert engine.pool.view(0) == numbers()
    (stored,) = engine.objects.values()
    assert len(stored) < 512 + 0.8 * CHUNK_BYTES
    assert len(stored) % 512 == 0
    assert engine.object_bytes == len(stored)
    assert engine.is_compressed
    assert engine.coding_s > 0
    for reader in (engine, plain):
        reader.pool.view(0)[:] = bytes(CHUNK_BYTES)
        assert await reader.do(LOAD) == "ok"
        assert reader.pool.view(0) == numbers()
        assert reader.object_bytes == len(stored)
        assert reader.is_compressed
        assert reader.coding_s > 0
    plain.pool.view(0)[:] = numbers(1)
    assert await plain.do(STORE) == "ok"
    assert len(*engine.objects.values()) == plain.object_bytes == engine_bytes(plain)
    assert await engine.do(LOAD) == "ok"
    assert engine.pool.view(0) == numbers(1)
    assert engine.object_bytes == engine_bytes(engine)
    assert plain.coding_s == engine.coding_s == 0
    assert not plain.is_compressed | engine.is_compressed


async def test_without_the_compiled_coder_nothing_is_compressed_and_no_chunk_is_deleted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = await make("compress=always"), await make()
    engine.pool.view(0)[:] = plain.pool.view(0)[:] = numbers()
    assert await engine.do(STORE) == "ok"
    monkeypatch.setattr(planes, "coder", None)
    with pytest.raises(ConfigError, match="tier 'memory': option 'compress' cannot be used: "):
        await make("compress=always")
    assert await plain.do(LOAD) == "failed"
    assert len(*engine.objects.values()) < 512 + 0.8 * CHUNK_BYTES
    plain.pool.view(0)[:] = numbers()
    assert await plain.do(STORE) == await plain.do(LOAD) == "ok"
    assert plain.pool.view(0) == numbers()


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_tier_compresses_once_it_knows_that_its_link_is_slow(
    make: Make, tmp_path: Path, is_sealed: bool
) -> None:
    codec = [f"codec={write_keys(tmp_path / 'chunk.keys', OURS)}"] * is_sealed
    engine, plain = await make("compress=auto", *codec, tier_class=Slow), await make(*codec)
    engine.pool.view(0)[:] = plain.pool.view(0)[:] = numbers()
    lengths = []
    for _ in range(10):
        engine.objects.clear()
        assert await engine.do(STORE) == "ok"
        lengths += [len(stored) for stored in engine.objects.values()]
    assert lengths[:8] == [engine_bytes(engine)] * 8
    assert lengths[9] < 0.8 * CHUNK_BYTES
    assert await plain.do(LOAD) == "ok"
    assert plain.pool.view(0) == numbers()


async def test_rounded_chunks_are_no_exact_engines_chunks(make: Make) -> None:
    rounding, exact = await make("compress=fp8"), await make("compress=always")
    facts = rounding.loop.call.tier.context.namespace.facts
    assert facts == {**exact.loop.call.tier.context.namespace.facts, "compress": "fp8"}
    rounding.pool.view(0)[:] = numbers()
    assert await rounding.do(STORE) == "ok"
    (stored,) = rounding.objects.values()
    assert len(stored) <= 512 + 0.54 * CHUNK_BYTES
    assert await rounding.do(LOAD) == "ok"
    rounded = bytes(rounding.pool.view(0))
    assert rounded == rounded_to_float8(numbers()) != numbers()
    assert await exact.do(LOAD) == "corrupt"
    rounding.objects[KEY] = stored
    assert await rounding.do(STORE) == await rounding.do(LOAD) == "ok"
    assert rounding.pool.view(0) == rounded, "a second coding loses nothing"


def rounded_to_float8(plain: bytes) -> bytes:
    memory = memoryview(bytearray(plain))
    Float8.decode(memory, Float8("bfloat16").encode(memoryview(plain), memory, 1), len(plain))
    return bytes(memory)


async def test_a_damaged_chunk_is_found_whatever_its_length(make: Make) -> None:
    engine = await make("compress=always")
    engine.pool.view(0)[:] = numbers()
    assert await engine.do(STORE) == "ok"
    whole = engine.objects[KEY]
    damaged = [whole[: len(whole) - cut] for cut in (1, 512, len(whole) - 512, len(whole))]
    damaged += [np.append(whole, np.zeros(more, np.uint8)) for more in (1, 512, CHUNK_BYTES)]
    for at in range(0, len(whole), 97):
        flipped = whole.copy()
        flipped[at] ^= 0x10
        damaged.append(flipped)
    # This object is as long as a plain chunk, but has a compressed chunk's header.
    damaged.append(np.append(whole, np.zeros(engine_bytes(engine) - len(whole), np.uint8)))
    for stored in damaged:
        engine.objects[KEY] = stored
        padding = set(range(64, 512))
        if await engine.do(LOAD) != "corrupt":
            (at,) = np.flatnonzero(stored != whole)
            assert at in padding, f"byte {at} of {len(stored)}"


async def test_an_operator_switches_it_on_and_off(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine, integers = await make(), await make(dtype="int8")
    for compress, is_compressed in (("always", True), ("never", False), ("auto", False)):
        options = engine.loop.options
        options.set_live(options.model_copy(update={"compress": compress}))
        engine.loop.options_changed()
        engine.pool.view(0)[:] = numbers()
        assert await engine.do(STORE) == "ok"
        assert engine.is_compressed is is_compressed
    assert not caplog.records
    integers.loop.options.set_live(options.model_copy(update={"compress": "always"}))
    integers.loop.options_changed()
    assert "'compress' has no effect: it is for" in caplog.text


def engine_bytes(engine: Engine) -> int:
    return engine.loop.call.tier.context.object_bytes


@pytest.mark.parametrize(
    ("compress", "tier_class", "dtype", "reason"),
    [
        ("always", FixedLength, "bfloat16", "all objects of this tier have one length"),
        ("always", Aligned, "int8", "and the chunks' dtype is int8"),
        ("fp8", Aligned, "fp8", "it is for bfloat16 and float16, and the chunks' dtype is fp8"),
    ],
)
async def test_where_it_cannot_compress_it_says_why_and_stores_chunks_as_they_are(
    make: Make,
    caplog: pytest.LogCaptureFixture,
    compress: str,
    tier_class: type,
    dtype: str,
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = await make(f"compress={compress}", tier_class=tier_class, dtype=dtype)
    assert reason in caplog.text
    engine.pool.view(0)[:] = numbers()
    assert await engine.do(STORE) == "ok"
    assert len(*engine.objects.values()) == engine_bytes(engine)
