from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.stores import (
    Folder,
    MemcachedStore,
    Mooncake,
    RedisStore,
    S3Store,
    ServedStore,
    Store,
)
from support.vllm_engine import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    OUR_MANAGER,
    OUR_TIERS,
    Engine,
    Way,
    make_prompt,
    same,
    settle_until,
)

CHUNKS = (3, 2, 4)
PROMPTS = [make_prompt(seed, chunks) for seed, chunks in enumerate(CHUNKS)]
FULL = [chunks * BLOCK_TOKENS for chunks in CHUNKS]


#: Each store meets each runner that it allows, and each way to offload meets each runner.
CASES = [
    pytest.param(case, id="-".join((case[0].name, case[1].name, case[2])))
    for case in (
        (OUR_TIERS, Folder, "thread"),
        (OUR_MANAGER, Folder, "process"),
        (OUR_TIERS, RedisStore, "process"),
        (OUR_MANAGER, RedisStore, "thread"),
        (OUR_TIERS, S3Store, "thread"),
        (OUR_MANAGER, S3Store, "process"),
        (OUR_TIERS, Mooncake, "process"),
        (OUR_MANAGER, MemcachedStore, "process"),
    )
]


@dataclass
class Second:
    engine: Engine
    store: Store
    before: tuple[int, int]
    outputs: list[dict[str, Any]]
    stats: dict[str, Any]


@pytest.fixture(scope="module", params=CASES)
def second(
    request: pytest.FixtureRequest, start_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Second]:
    way, kind, runner = request.param
    store = kind(tmp_path_factory.mktemp("store") / "kv", CHUNK_BYTES)
    with start_engine(way.offloading(store.url, runner=runner)) as first:
        first.generate(prompts=PROMPTS)
        first.settle()
    # The test that restarts the store needs short probe intervals.
    options = {"runner": runner, "probe_interval": "100ms", "max_probe_interval": "100ms"}
    # Only one case starts a fresh interpreter, because imports are slow.
    fresh = (way, kind) == (OUR_MANAGER, Folder)
    with start_engine(way.offloading(store.url, **options), fresh=fresh) as engine:
        before = engine.device_blocks(), engine.primary_chunks()
        outputs = engine.generate(prompts=PROMPTS)
        engine.settle()
        yield Second(engine, store, before, outputs, engine.stats()[store.name])
    store.kill()


def test_the_tier_serves_the_second_process_every_full_chunk(second: Second, plain: Any) -> None:
    assert same(second.outputs, plain.outputs(PROMPTS))
    assert [output["cached"] for output in second.outputs] == FULL
    assert second.before == (0, 0)
    stats = second.stats
    assert stats["loaded_chunks"] == stats["hit_chunks"] == sum(CHUNKS) == second.store.chunks()
    assert stats["stored_chunks"] == 0
    assert stats["failures"] == {}


def test_a_damaged_chunk_is_recomputed(second: Second, plain: Any) -> None:
    engine = second.engine
    assert engine.reset_all()
    second.store.damage()
    outputs = engine.generate(prompts=PROMPTS)
    engine.settle()
    assert [output["cached"] for output in outputs] == [0, 0, 0]
    assert same(outputs, plain.outputs(PROMPTS))
    assert engine.stats()[second.store.name]["failures"] == {"load.corrupt": sum(CHUNKS)}
    # The recomputed chunks have replaced the damaged chunks.
    assert_served_from_the_tier(engine, plain)


def test_no_request_fails_when_the_store_goes_away_under_load(second: Second, plain: Any) -> None:
    engine, store = second.engine, second.store
    assert engine.reset_all()
    engine.add(prompts=PROMPTS[:1])
    assert engine.step_until_loading()
    store.kill()
    engine.add(prompts=PROMPTS[1:])
    assert same(engine.finish(), plain.outputs(PROMPTS))
    engine.settle()
    assert engine.stats()[store.name]["failures"]
    # Wait, because a client may still be waiting for the killed store.
    settle_until(engine, lambda: not any(engine.leftovers().values()), "nothing is left over")
    if not isinstance(store, ServedStore):
        return
    store.start()

    def is_used() -> bool:
        stats = engine.stats()[store.name]
        return not (stats["reads_open"] or stats["stores_open"])

    settle_until(engine, is_used, f"{store.name} is used again")
    assert engine.reset_all()
    engine.generate(prompts=PROMPTS)
    engine.settle()
    assert_served_from_the_tier(engine, plain)


def assert_served_from_the_tier(engine: Engine, plain: Any) -> None:
    assert engine.reset_all()
    outputs = engine.generate(prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == FULL
    assert same(outputs, plain.outputs(PROMPTS))


def test_no_verification(offloading_way: Way, start_engine: Any, folder: Path, plain: Any) -> None:
    store = Folder(folder / f"unverified-{offloading_way.name}", CHUNK_BYTES)
    with start_engine(offloading_way.offloading(store.url, verify=False)) as engine:
        engine.generate(prompts=PROMPTS)
        engine.settle()
        assert engine.reset_all()
        store.damage()
        outputs = engine.generate(prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == FULL
    assert not same(outputs, plain.outputs(PROMPTS))
