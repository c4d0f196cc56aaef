"""A tier with ``store_policy=on_evict`` gets the chunks that the pool evicts, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live import Live, live

from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, replay
from kvtier_sdk.events import PRIMARY

SLOTS = 150


def play(engine: Live, request: ReplayRequest) -> tuple[set[bytes], set[bytes]]:
    context = engine.begin(request.request_id)
    # A step can use no more slots than this, because slots are freed only at the end of the step.
    window = engine.manager.headroom_slots
    for start in range(0, len(request.keys), window):
        keys = request.keys[start : start + window]
        names = engine.settle(context, *keys)
        hits = names.index("MISS") if "MISS" in names else len(names)
        if hits:
            engine.load(context, *keys[:hits])
            engine.rest()
        engine.store(context, *keys[hits:])
    engine.manager.on_request_finished(context)
    engine.rest()
    evicted: set[bytes] = set()
    stored: set[bytes] = set()
    for event in engine.manager.take_events():
        if event.tier == PRIMARY and event.removed:
            evicted.update(event.keys)
        elif event.tier != PRIMARY:
            stored.update(event.keys)
    return evicted, stored


def test_the_tier_holds_what_was_evicted_and_nothing_else(tmp_path: Path, runner: str) -> None:
    evicted: set[bytes] = set()
    stored: set[bytes] = set()
    url = f"file://{tmp_path}?store_policy=on_evict&runner={runner}"
    # Use LRU, because it evicts exactly the chunks that the policy has stored in advance.
    with live([url], slots=SLOTS, events=True, policy="lru") as engine:
        for request in chat_workload(100, seed=3):
            gone, kept = play(engine, request)
            evicted |= gone
            stored |= kept
        still_there = engine.manager.usage().ready
        assert engine.manager.stats[1].dropped == {}
    assert stored == evicted
    assert stored
    files = {bytes.fromhex(path.stem) for path in tmp_path.rglob("*.kv")}
    assert files == stored
    assert still_there > SLOTS // 2


@pytest.mark.parametrize("slots", [60, 150])
def test_the_hit_rate_is_that_of_write_through(slots: int) -> None:
    workload = chat_workload(150, seed=4)
    reports = {
        policy: replay(
            workload,
            TieringConfig.from_dict(
                {"slots": slots, "chunk_bytes": 4096, "tiers": [f"memory:?store_policy={policy}"]}
            ),
        )
        for policy in ("through", "on_evict")
    }
    through, spilled = reports["through"], reports["on_evict"]
    assert spilled.hit_chunks == through.hit_chunks
    assert (spilled.dropped, spilled.wrong_bytes) == (0, 0)
    assert spilled.tiers[1].hit_chunks > 0
    assert spilled.tiers[1].stored_chunks < through.tiers[1].stored_chunks
