"""What one process has stored, the next one finds, and nothing but what was stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import BLOCK_TOKENS, Engine, Tier, Way, make_prompt, same

CHUNKS = (3, 2, 4)
PROMPTS = [make_prompt(seed, chunks) for seed, chunks in enumerate(CHUNKS)]


@dataclass
class Second:
    """The second process, which has served what the first one has, and nothing else.

    Attributes:
        engine: it.
        tier: that both use.
        before: blocks on the device and chunks in the host pool before it served anything.
        outputs: of the prompts.
        stats: what the tiers counted while it served them.
    """

    engine: Engine
    tier: Tier
    before: tuple[int, int]
    outputs: list[dict[str, Any]]
    stats: dict[str, Any]


@pytest.fixture(scope="module")
def second(way: Way, start_engine: Any, folder: Path) -> Iterator[Second]:
    tier = Tier.file(folder / f"two-processes-{way.name}")
    offloading = way.offloading(tier.url)
    if way.offloads:
        with start_engine(offloading) as first:
            first.generate(prompts=PROMPTS)
            first.settle()
    with start_engine(offloading, fresh=way.offloads) as engine:
        before = engine.device_blocks(), engine.primary_chunks() if way.offloads else 0
        outputs = engine.generate(prompts=PROMPTS)
        if way.offloads:
            engine.settle()
        yield Second(engine, tier, before, outputs, engine.stats() if way.offloads else {})


def test_the_second_process_answers_as_an_engine_without_offloading(
    second: Second, plain: Any
) -> None:
    assert same(second.outputs, plain.outputs(PROMPTS))


def test_the_second_process_finds_every_full_chunk(second: Second, way: Way) -> None:
    found = [chunks * BLOCK_TOKENS if way.offloads else 0 for chunks in CHUNKS]
    assert [output["cached"] for output in second.outputs] == found


def test_what_it_found_came_from_the_tier(second: Second, way: Way) -> None:
    if not way.offloads:
        pytest.skip("nothing is offloaded")
    assert second.before == (0, 0)
    stats = second.stats[second.tier.name]
    assert stats["loaded_chunks"] == stats["hit_chunks"] == sum(CHUNKS)
    assert stats["stored_chunks"] == 0
    assert stats["failures"] == {}


def test_a_damaged_chunk_is_recomputed(second: Second, way: Way, plain: Any) -> None:
    if not way.offloads:
        pytest.skip("nothing is offloaded")
    engine = second.engine
    assert engine.reset_all()
    second.tier.damage()
    damaged = len(second.tier.chunks())
    outputs = engine.generate(prompts=PROMPTS)
    engine.settle()
    assert [output["cached"] for output in outputs] == [0, 0, 0]
    assert same(outputs, plain.outputs(PROMPTS))
    assert engine.stats()[second.tier.name]["failures"] == {"load.corrupt": damaged}
    # What was damaged is gone, and what was recomputed has taken its place.
    assert engine.reset_all()
    again = engine.generate(prompts=PROMPTS)
    assert [output["cached"] for output in again] == [chunks * BLOCK_TOKENS for chunks in CHUNKS]
    assert same(again, plain.outputs(PROMPTS))


def test_without_verification_a_damaged_chunk_is_served(
    offloading_way: Way, start_engine: Any, folder: Path, plain: Any
) -> None:
    # The comparison with the plain engine can fail, and digests are what keeps it from failing.
    tier = Tier.file(folder / f"unverified-{offloading_way.name}")
    with start_engine(offloading_way.offloading(tier.url, verify=False)) as engine:
        engine.generate(prompts=PROMPTS)
        engine.settle()
        assert engine.reset_all()
        tier.damage()
        outputs = engine.generate(prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == [chunks * BLOCK_TOKENS for chunks in CHUNKS]
    assert not same(outputs, plain.outputs(PROMPTS))
