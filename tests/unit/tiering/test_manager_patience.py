"""The engine's compute rate decides how long a lookup may take, and whether a load is worth it."""

from __future__ import annotations

import pytest
from support.engine import KEYS, A, B, Engine, Make, stored_below

#: Seconds that the engine of these tests needs to compute a chunk.
CHUNK_S = 0.04


def computing(make: Make, **options: object) -> Engine:
    """Return an engine that has computed three prompts of four chunks. Its tier has KEYS[:4]."""
    engine = make(slots=16, **options)
    stored_below(engine, *KEYS[:4])
    for start in range(100, 112, 4):
        engine.store(A, *KEYS[start : start + 4])
        engine.step(4 * CHUNK_S)
        engine.step()
    return engine


def slow_down(engine: Engine, seconds: float) -> None:
    tier = engine.tiers[0]
    tier.config = tier.config.model_copy(update={"latency_s": seconds})


def answers_after(engine: Engine, seconds: float) -> list[str]:
    slow_down(engine, seconds)
    engine.look(B, *KEYS[:4])
    engine.steps(seconds, step_s=seconds / 4)
    slow_down(engine, 0.0)
    return engine.settle(B, *KEYS[:4])


def test_a_busy_machine_still_serves_full_hits(make: Make) -> None:
    engine = computing(make)
    assert engine.manager.stats[0].recompute_s == pytest.approx(CHUNK_S, rel=0.05)
    # 100 ms is twice a lookup's usual limit, but recomputing takes 160 ms, so waiting is faster.
    assert answers_after(engine, 0.1) == ["HIT"] * 4


@pytest.mark.parametrize(("seconds", "verdict"), [(0.9, "HIT"), (1.2, "MISS")])
def test_a_new_engine_waits_up_to_the_bound(make: Make, seconds: float, verdict: str) -> None:
    engine = make(slots=16)
    stored_below(engine, *KEYS[:4])
    assert engine.manager.stats[0].recompute_s is None
    assert answers_after(engine, seconds) == [verdict] * 4


def test_an_answer_that_comes_later_than_recomputing_would_take_is_a_miss(make: Make) -> None:
    engine = computing(make)
    assert answers_after(engine, 0.3) == ["MISS"] * 4
    assert engine.manager.stats[0].misses["timeout"] == 4


@pytest.mark.parametrize(
    "options", [{"max_lookup_deadline": "50ms"}, {"manager": {"recompute_s": 0.001}}]
)
def test_options_override_what_was_learnt(make: Make, options: dict[str, object]) -> None:
    assert answers_after(computing(make, **options), 0.1) == ["MISS"] * 4
