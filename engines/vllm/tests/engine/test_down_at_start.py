from collections.abc import Iterator
from typing import Any

import pytest
from support.stores import Mooncake, RedisStore, S3Store, ServedStore
from support.vllm_engine import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    OUR_MANAGER,
    OUR_TIERS,
    Engine,
    make_prompt,
    same,
    settle_until,
)

CHUNKS = (2, 3)
PROMPTS = [make_prompt(seed, chunks) for seed, chunks in enumerate(CHUNKS)]
FULL = [chunks * BLOCK_TOKENS for chunks in CHUNKS]


#: Tiers first open for vLLM's default, ``sha256``. A request reopens them for ``sha256_cbor``.
CASES = [
    pytest.param(case, id="-".join((case[0].name, case[1].name, case[2])))
    for case in (
        (OUR_TIERS, RedisStore, "sha256"),
        (OUR_MANAGER, RedisStore, "sha256_cbor"),
        (OUR_MANAGER, S3Store, "sha256"),
        (OUR_TIERS, S3Store, "sha256_cbor"),
        (OUR_MANAGER, Mooncake, "sha256"),
    )
]


Early = tuple[Engine, ServedStore]


@pytest.fixture(scope="module", params=CASES)
def early(
    request: pytest.FixtureRequest, start_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Early]:
    way, kind, algorithm = request.param
    store = kind(tmp_path_factory.mktemp("store") / "kv", CHUNK_BYTES)
    store.kill()
    # The tier must still be trying to open when the store starts.
    options = {"probe_interval": "100ms", "max_probe_interval": "100ms", "open_deadline": "10m"}
    offloading = way.offloading(store.url, **options)
    with start_engine(offloading, prefix_caching_hash_algo=algorithm) as engine:
        yield engine, store
    store.kill()


def test_it_serves_without_its_store(early: Early, plain: Any) -> None:
    engine, store = early
    assert same(engine.generate(prompts=PROMPTS), plain.outputs(PROMPTS))
    engine.settle()
    tier = engine.stats()[store.name]
    assert tier["is_open"] == 0
    assert tier["dropped"]["store.unavailable"] == sum(CHUNKS)
    assert not any(engine.leftovers().values()), engine.leftovers()
    assert engine.metrics()[f"kvtier_tier_open,tier={store.name}"] == 0


def test_it_is_served_from_the_tier_when_the_store_is_back(early: Early, plain: Any) -> None:
    engine, store = early
    store.start()
    # Settle first, so that ``failures`` includes all attempts so far.
    engine.settle()
    failures = engine.stats()[store.name]["open_failures"]
    settle_until(engine, lambda: engine.stats()[store.name]["is_open"], f"{store.name} is open")
    # Up to two attempts that began before the store started may still fail.
    assert engine.stats()[store.name]["open_failures"] - failures <= 2
    assert engine.reset_all()
    engine.generate(prompts=PROMPTS)
    engine.settle()
    assert engine.stats()[store.name]["stored_chunks"] == sum(CHUNKS) == store.chunks()
    assert engine.reset_all()
    outputs = engine.generate(prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == FULL
    assert same(outputs, plain.outputs(PROMPTS))
    assert engine.stats()[store.name]["hit_chunks"] == sum(CHUNKS)
