from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engine import KEYS, A, B, Engine, stored_below

from kvtier_sdk import Namespace, RequestContext, TierStats, make_offload_key
from kvtier_sdk.engine import Savings

ONE_GROUP = Namespace({"model": "m", "tokens_per_chunk": 16})
C = RequestContext("c")


def saved(stats: list[TierStats]) -> list[tuple[float, float]]:
    return [(of.saved_tokens["m"], pytest.approx(of.saved_prefill_s["m"])) for of in stats]


def test_a_hit_saves_in_the_tier_that_it_came_from(make: Callable[..., Engine]) -> None:
    engine = make(slots=8, manager={"namespace": ONE_GROUP, "recompute_s": 0.5})
    assert saved(engine.manager.stats) == [(0, 0), (0, 0)]
    stored_below(engine, *KEYS[:3])
    for request, tiers in ((B, [(0, 0), (48, 1.5)]), (C, [(48, 1.5), (48, 1.5)])):
        if request is C:
            engine.manager.on_new_request(C)
        assert engine.settle(request, *KEYS[:3]) == ["HIT"] * 3
        engine.load(request, *KEYS[:3])
        engine.step()
        assert saved(engine.manager.stats) == tiers
    assert [of.hit_chunks for of in engine.manager.stats] == [3, 3]


def test_hits_from_before_the_speed_is_known_get_their_time_once_it_is(
    make: Callable[..., Engine],
) -> None:
    engine = make(slots=8, manager={"namespace": ONE_GROUP})
    engine.store(A, *KEYS[:2])
    engine.load(A, *KEYS[:2])
    engine.step()
    assert saved(engine.manager.stats)[0] == (32, 0)
    # Pretend that an earlier engine measured the speed.
    engine.manager.savings.rate.chunk_s = 0.25
    engine.step()
    engine.step()
    assert saved(engine.manager.stats)[0] == (32, 0.5), "once"
    assert engine.manager.stats[0].recompute_s == 0.25


def test_a_measured_speed_replaces_an_earlier_engines(make: Callable[..., Engine]) -> None:
    engine = make(slots=64, manager={"namespace": ONE_GROUP})
    engine.manager.savings.rate.chunk_s = 9.0
    for burst in range(4):
        engine.store(A, *KEYS[8 * burst : 8 * burst + 8])
        engine.step(0.4)
        engine.step(0.4)
    assert engine.manager.stats[0].recompute_s == pytest.approx(0.05, rel=0.01)


def test_a_group_with_a_window_loads_few_chunks_of_the_same_tokens() -> None:
    groups = [{"tokens_per_block": 16}, {"tokens_per_block": 32}]
    host, file = TierStats("host", "primary"), TierStats("file", "file")
    facts = {"model": "m", "blocks_per_chunk": 2, "groups": groups}
    savings = Savings(host, Namespace(facts), 0.1)
    savings.add(file)
    window = [make_offload_key(bytes([n]) * 32, 0) for n in range(2)]
    whole = [make_offload_key(bytes([n]) * 32, 1) for n in range(6)]
    savings.note([*window, *whole], [-1, 0, *[-1] * 2, *[0] * 4])
    savings.step_ended(0.0)
    # 64 tokens fill two chunks of one group, and one chunk of the other group.
    assert saved([host, file]) == [(128, 0.6), (256, 1.2)]
    assert (host.hit_chunks, file.hit_chunks) == (3, 5)


def test_an_engine_that_leaves_a_group_out_keeps_the_numbers_of_the_others() -> None:
    groups = [{"tokens_per_block": 16}, {"tokens_per_block": 16}]
    host = TierStats("host", "primary")
    savings = Savings(host, Namespace({"blocks_per_chunk": 1, "groups": groups, "model": "m"}), 0.1)
    keys = [make_offload_key(bytes([n]) * 32, group) for n in range(3) for group in (2, 5)]
    savings.note(keys, [-1] * 6)
    savings.note([], [])
    savings.step_ended(0.0)
    assert saved([host]) == [(48, 0.6)]


def test_without_the_tokens_of_a_chunk_only_hits_are_counted(make: Callable[..., Engine]) -> None:
    engine = make(manager={"namespace": Namespace({"model": "m"}), "recompute_s": 0.5})
    engine.store(A, *KEYS[:2])
    engine.load(A, *KEYS[:2])
    engine.step()
    (host, *_) = engine.manager.stats
    assert (host.hit_chunks, host.saved_tokens, host.saved_prefill_s) == (2, {}, {})


@pytest.mark.parametrize(
    ("facts", "tokens"),
    [
        ({"groups": [{"tokens_per_block": 16}], "blocks_per_chunk": 8}, [128]),
        ({"tokens_per_chunk": 256}, [256]),
        ({"tokens_per_chunk": "256"}, []),
        ({"tokens_per_chunk": 0}, []),
        ({"groups": 7, "blocks_per_chunk": 8}, []),
        ({"groups": [16], "blocks_per_chunk": 8}, []),
        ({}, []),
    ],
)
def test_the_facts_say_how_many_tokens_a_chunk_has(
    facts: dict[str, object], tokens: list[int]
) -> None:
    assert Namespace(facts).tokens_per_chunk == tokens
