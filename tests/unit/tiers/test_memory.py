from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from kvtier_sdk import (
    ChunkNotFoundError,
    ConfigError,
    MemoryTier,
    OffloadKey,
    RequestContext,
    TierContext,
    Transfer,
    Usage,
)
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.testing import VirtualClock

T = TypeVar("T")

REQUEST = RequestContext("r")
OBJECT_BYTES = 64 + 256
ContextFactory = Callable[..., TierContext]


def make_tier(context: TierContext, **options: object) -> MemoryTier:
    config = validate_options(MemoryTier.config_model, options, Place("tier"))
    return MemoryTier(config, context)


def transfer(key: OffloadKey, fill: int = 0, *, payload_bytes: int = 256) -> Transfer:
    header, payload = bytearray([fill] * 64), bytearray([fill ^ 0xFF] * payload_bytes)
    return Transfer(key, REQUEST, memoryview(header), memoryview(payload))


async def stored_keys(tier: MemoryTier) -> list[OffloadKey]:
    return [entry.key async for entry in tier.scan()]


def run_virtually(clock: VirtualClock, coroutine: Coroutine[Any, Any, T]) -> T:
    loop = clock.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


@pytest.mark.parametrize("use", ["load", "touch", "store"])
async def test_a_full_tier_forgets_the_least_recently_used(
    make_context: ContextFactory, removed: list[OffloadKey], use: str
) -> None:
    tier = make_tier(make_context(), capacity=2 * OBJECT_BYTES)
    await tier.store([transfer(b"a"), transfer(b"b")])
    await getattr(tier, use)([b"unknown", b"a"] if use == "touch" else [transfer(b"a")])
    await tier.store([transfer(b"c")])
    assert await stored_keys(tier) == [b"a", b"c"]
    assert removed == [b"b"]
    assert await tier.usage() == Usage(2, 2 * OBJECT_BYTES, 2 * OBJECT_BYTES)


async def test_a_lookup_is_no_use(make_context: ContextFactory, removed: list[OffloadKey]) -> None:
    tier = make_tier(make_context(), capacity=2 * OBJECT_BYTES)
    await tier.store([transfer(b"a"), transfer(b"b")])
    await tier.lookup([b"a"], REQUEST)
    await tier.store([transfer(b"c")])
    assert removed == [b"a"]


async def test_deleting_reports_what_was_there(
    make_context: ContextFactory, removed: list[OffloadKey]
) -> None:
    tier = make_tier(make_context())
    await tier.store([transfer(b"a"), transfer(b"b")])
    await tier.delete([b"a", b"x"])
    assert removed == [b"a"]
    assert await tier.usage() == Usage(1, OBJECT_BYTES, None)


def test_each_call_takes_the_latency(make_context: ContextFactory) -> None:
    clock = VirtualClock()
    tier = make_tier(make_context(clock), latency="10ms")
    run_virtually(clock, tier.store([transfer(b"a"), transfer(b"b")]))
    assert clock.now_s() == pytest.approx(0.01)
    run_virtually(clock, tier.load([transfer(b"a")]))
    assert clock.now_s() == pytest.approx(0.02)
    run_virtually(clock, tier.lookup([b"a"], REQUEST))
    assert clock.now_s() == pytest.approx(0.03)


def test_transfers_share_the_bandwidth(make_context: ContextFactory) -> None:
    clock = VirtualClock()
    tier = make_tier(make_context(clock), latency="10ms", bandwidth=OBJECT_BYTES)
    ended_s = {}

    async def store(key: OffloadKey) -> None:
        await tier.store([transfer(key)])
        ended_s[key] = clock.now_s()

    async def both() -> None:
        await asyncio.gather(store(b"a"), store(b"b"))

    run_virtually(clock, both())
    assert ended_s == {b"a": pytest.approx(1.01), b"b": pytest.approx(2.01)}


def test_an_idle_wire_saves_nothing_up(make_context: ContextFactory) -> None:
    clock = VirtualClock()
    tier = make_tier(make_context(clock), bandwidth=OBJECT_BYTES)
    clock.advance(100.0)
    run_virtually(clock, tier.store([transfer(b"a")]))
    assert clock.now_s() == pytest.approx(101.0)


def test_a_chunk_expires_that_is_not_used(
    make_context: ContextFactory, removed: list[OffloadKey]
) -> None:
    clock = VirtualClock()
    context = make_context(clock)

    async def scenario() -> None:
        tier = make_tier(context, ttl="1h")
        await tier.store([transfer(key) for key in (b"a", b"b", b"c", b"d")])
        await clock.sleep(2000)
        assert await tier.load([transfer(b"a")]) == [None]
        await tier.touch([b"b"])
        await tier.store([transfer(b"c")])
        await clock.sleep(2000)
        assert await tier.lookup([b"a", b"b", b"c", b"d"], REQUEST) == [True, True, True, False]
        assert removed == [b"d"]
        await clock.sleep(2000)
        (verdict,) = await tier.load([transfer(b"a")])
        assert isinstance(verdict, ChunkNotFoundError)
        assert await tier.usage() == Usage(0, 0, None)

    run_virtually(clock, scenario())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_age", "1us", "option 'max_age' is '1us' but should be greater than"),
        ("ttl", "1us", "option 'ttl' is '1us' but should be greater than"),
        ("min_free", "5%", "option 'min_free': the memory tier has no file system"),
    ],
)
def test_limits_that_cannot_be(
    make_context: ContextFactory, option: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tier(make_context(), **{option: value})
