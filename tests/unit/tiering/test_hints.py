from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.core import pure_core_only
from support.engine import KEYS, A, Engine, Make

from kvtier_sdk import OffloadKey, RequestContext, make_offload_key, split_offload_key
from kvtier_sdk.engine import read_request
from kvtier_sdk.hints import Outcome, Receipt, Verb
from kvtier_sdk.tiering.tier_client import TierClient

ALL = {"hint_share": 1.0}


def turn(
    engine: Engine,
    name: str,
    keys: Sequence[OffloadKey],
    *,
    ends: bool = False,
    **hints: Any,
) -> list[Receipt]:
    request = read_request(name, {"kvtier": hints})
    engine.manager.on_new_request(request)
    for key in keys:
        engine.store(request, key)
    engine.manager.touch(keys, request)
    tokens = {key: 16 * (place + 1) for place, key in enumerate(keys)}
    engine.manager.on_request_finished(request, tokens if ends else None)
    engine.step(times=2)
    return engine.manager.take_receipts()


def outcomes(receipts: Sequence[Receipt]) -> list[tuple[str, str, int]]:
    return [(one.verb.value, one.outcome.value, one.chunks) for one in receipts]


def present(engine: Engine, *keys: OffloadKey) -> list[bool]:
    return [key in engine.manager._by_key for key in keys]


def flood(engine: Engine) -> None:
    for _ in range(2):
        engine.push_out(A)


# --- pins -------------------------------------------------------------------------------------


def test_a_pinned_chunk_outlives_other_traffic_until_its_time_is_over(make: Make) -> None:
    engine = make(slots=8, manager=ALL)
    (receipt,) = turn(engine, "r", KEYS[:2], pin="5m", session="s")
    assert (receipt.outcome, receipt.chunks, receipt.duration_s) == (Outcome.ACCEPTED, 2, 300.0)
    assert str(receipt) == "pin for session 's': accepted, 2 chunks, 300 s"
    flood(engine)
    assert present(engine, *KEYS[:2]) == [True, True]
    assert engine.manager.usage().leased == 2
    engine.step(301.0)
    engine.step()
    assert engine.manager.usage().leased == 0
    flood(engine)
    assert present(engine, *KEYS[:2]) == [False, False]


def test_a_request_that_had_the_chunks_on_its_device_renews_a_pin(make: Make) -> None:
    engine = make(slots=8, manager=ALL)
    turn(engine, "r", KEYS[:1], pin="5m")
    engine.step(200.0)
    late = RequestContext("late")
    engine.manager.on_new_request(late)
    engine.manager.on_request_finished(late, {KEYS[0]: 16})
    engine.step(200.0)
    engine.step()
    assert engine.manager.usage().leased == 1


def test_a_use_does_not_revive_a_lease_that_no_step_has_ended_yet(make: Make) -> None:
    engine = make(slots=8, manager=ALL)
    turn(engine, "r", KEYS[:1], pin="1m")
    late = RequestContext("late")
    engine.manager.on_new_request(late)
    engine.step(61.0)
    engine.manager.on_request_finished(late, {KEYS[0]: 16})
    assert engine.manager.usage().leased == 0


def test_a_receipt_says_what_was_clipped(make: Make) -> None:
    engine = make(slots=8, tiers=0, manager={"hint_share": 0.25, "hint_duration_s": 60.0})
    (receipt,) = turn(engine, "r", KEYS[:4], pin="5m")
    assert (receipt.outcome, receipt.chunks, receipt.duration_s) == (Outcome.CLIPPED, 2, 60.0)
    assert receipt.reason == "2 chunks are over the budget of 2; the longest is 60 s"
    assert list(engine.manager._primary.leases.held) == KEYS[:2], "the begin of the prefix"
    absent = read_request("q", {"kvtier": {"pin": True}})
    engine.manager.on_new_request(absent)
    engine.look(absent, KEYS[40])
    engine.manager.on_request_finished(absent, {KEYS[40]: 16})
    (receipt,) = engine.manager.take_receipts()
    assert (receipt.outcome, receipt.reason) == (
        Outcome.REFUSED,
        "1 chunks are not in the pool; the longest is 60 s",
    )
    assert engine.manager.stats[0].hints == {"pin.clipped": 1, "pin.refused": 1}


def test_a_lower_budget_ends_no_pin_and_admits_no_other(make: Make) -> None:
    engine = make(slots=8, tiers=0, manager={"hint_share": 0.5})
    turn(engine, "r", KEYS[:4], pin="5m")
    engine.manager.limit_hints(0.25, 60.0)
    (receipt,) = turn(engine, "s", KEYS[4:6], pin="5m")
    assert (receipt.outcome, receipt.chunks) == (Outcome.REFUSED, 0)
    assert len(engine.manager._primary.leases.held) == 4


def test_an_answer_that_is_not_offloaded_is_not_missed(make: Make) -> None:
    engine = make(slots=8, tiers=0, manager=ALL)
    request = read_request("r", {"kvtier": {"pin": "1m"}})
    engine.manager.on_new_request(request)
    engine.store(request, KEYS[0])
    engine.manager.on_request_finished(request, {KEYS[0]: 16, KEYS[1]: 32})
    assert outcomes(engine.manager.take_receipts()) == [("pin", "accepted", 1)]


def test_a_range_of_tokens_needs_an_engine_that_knows_them(make: Make) -> None:
    engine = make(slots=8, tiers=0, manager=ALL)
    (receipt,) = turn(engine, "r", KEYS[:4], pin={"tokens": [16, 33]})
    assert (receipt.outcome, receipt.chunks) == (Outcome.REFUSED, 0)
    assert receipt.reason == "the engine does not say where chunks end"
    turn(engine, "q", KEYS[:4], ends=True, pin={"tokens": [16, 33]})
    assert list(engine.manager._primary.leases.held) == KEYS[1:3]


def test_what_cannot_be_read_is_refused_with_advice(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = make(slots=8, tiers=0, manager=ALL)
    (receipt,) = turn(engine, "r", KEYS[:1], pinn="5m")
    assert (receipt.verb, receipt.outcome) == (Verb.UNKNOWN, Outcome.REFUSED)
    assert "did you mean 'pin'?" in receipt.reason
    assert f"host: hint for request r: refused, 0 chunks: {receipt.reason}" in caplog.messages


def test_actions_add_leases_to_each_other_and_to_the_table() -> None:
    ranges = [[0, 16], [32, 48], [64, 80]]
    table, *payloads = [{"tokens": tokens} for tokens in ranges]
    actions = [("pin", payload) for payload in payloads]
    request = read_request("r", {"kvtier": {"pin": table}}, [*actions, ("resume_in", {"value": 8})])
    pins = [hint.tokens for hint in request.hints if hint.verb is Verb.PIN]
    assert pins == [tuple(tokens) for tokens in ranges]
    assert request.resume_in_s == 8.0


# --- budgets ----------------------------------------------------------------------------------


def test_pins_leave_stores_their_reserve(make: Make) -> None:
    engine = make(slots=8, tiers=0, manager={"hint_share": 1.0, "store_reserve": 0.5})
    assert outcomes(turn(engine, "r", KEYS[:6], pin="1h")) == [("pin", "clipped", 4)]
    assert engine.manager.prepare_store(KEYS[100:104], A).rejected_keys == []


# --- demote, end ------------------------------------------------------------------------------


def test_what_a_last_turn_stores_goes_to_no_tier(make: Make) -> None:
    engine = make(slots=8)
    turn(engine, "r", KEYS[:1], session="s")
    assert outcomes(turn(engine, "q", KEYS[:2], session="s", end=True)) == [("end", "accepted", 2)]
    turn(engine, "p", KEYS[2:3], session="t", demote=True)
    engine.at_rest()
    assert set(engine.tiers[0]._objects) == {KEYS[0], KEYS[2]}


def test_what_a_last_turn_uses_again_goes_to_no_tier(make: Make) -> None:
    each = [{"offload_policy": "request"}, {"store_policy": "after_hits:1"}]
    engine = make(slots=8, tiers=2, each=each)
    last = read_request("last", {"kvtier": {"end": True}})
    engine.manager.on_new_request(last)
    engine.store(last, *KEYS[:2])
    # After a preemption, the request finds its first chunk and recomputes the second.
    assert engine.settle(last, KEYS[0]) == ["HIT"]
    engine.load(last, KEYS[0])
    engine.store(last, KEYS[1])
    engine.manager.on_request_finished(last)
    engine.at_rest()
    assert not engine.tiers[0]._objects
    assert not engine.tiers[1]._objects


def test_what_a_last_turn_stores_goes_to_the_tier_that_another_request_asks_for(make: Make) -> None:
    engine = make(slots=8, offload_policy="request")
    last = read_request("last", {"kvtier": {"end": True}})
    engine.manager.on_new_request(last)
    engine.write(engine.manager.prepare_store(KEYS[:1], last))
    engine.manager.prepare_store(KEYS[:1], A)
    engine.manager.complete_store(KEYS[:1], last)
    engine.step(times=3)
    assert list(engine.tiers[0]._objects) == KEYS[:1]


# --- prefetch ---------------------------------------------------------------------------------


def left_pool(make: Make, **hints: Any) -> Engine:
    engine = make(slots=32, manager={"hint_share": 0.5})
    turn(engine, "r", KEYS[:6], session="s", **hints)
    flood(engine)
    assert not any(present(engine, *KEYS[:6]))
    engine.manager.take_receipts()
    return engine


def test_a_prefetch_brings_the_chunks_back_before_the_turn(make: Make) -> None:
    engine = left_pool(make, resume_in=60, prefetch=True)
    engine.steps(58.0 - engine.clock.now_s(), 0.1)
    assert not any(present(engine, *KEYS[:6]))
    engine.steps(2.0, 0.05)
    assert all(present(engine, *KEYS[:6]))
    (receipt,) = engine.manager.take_receipts()
    assert (receipt.verb, receipt.outcome, receipt.chunks) == (Verb.PREFETCH, Outcome.ACCEPTED, 6)
    # Prefetched chunks stay in the pool until a turn has used them.
    flood(engine)
    assert engine.look(A, *KEYS[:6]) == ["HIT"] * 6
    assert not engine.manager.stats[0].misses, "nobody has missed anything"
    engine.manager.on_request_finished(A)
    engine.at_rest()
    assert engine.manager.left_over() == {"pins": 0, "slots": 0, "requests": 1, "jobs": 0}


def test_a_prefetch_loads_only_from_the_tiers_that_its_request_may_use(make: Make) -> None:
    engine = left_pool(make)
    asking = read_request("q", {"kvtier": {"prefetch": "s"}})
    engine.manager.on_new_request(asking, [])
    engine.manager.on_request_finished(asking)
    engine.steps(2.0, 0.05)
    assert not any(present(engine, *KEYS[:6]))
    assert outcomes(engine.manager.take_receipts())[-1] == ("prefetch", "refused", 0)


def test_a_sessions_name_does_not_give_it_the_prefetched_chunks_of_another(make: Make) -> None:
    engine = left_pool(make)
    turn(engine, "q", KEYS[20:21], prefetch="s")
    engine.steps(2.0, 0.05)
    turn(engine, "p", KEYS[21:22], session="s prefetch", end=True)
    assert engine.manager.usage().leased == 6


def test_a_prefetch_waits_for_a_load_without_a_lookup(make: Make) -> None:
    engine = left_pool(make)
    asking = read_request("q", {"kvtier": {"prefetch": "s"}})
    engine.manager.on_new_request(asking)
    engine.manager.on_request_finished(asking)
    engine.look(A, *KEYS[4:6])
    engine.step()
    loads = [keys for name, keys in engine.tiers[0].calls if name == "load"]
    assert loads == [KEYS[4:6]], "the prefetch's chunks are known to be in the tier too"
    engine.step(times=10)
    assert all(present(engine, *KEYS[:6]))


def test_a_prefetch_for_another_session_ends_at_its_turn(make: Make) -> None:
    engine = left_pool(make)
    engine.tiers[0].gated, engine.tiers[0].gate = {"lookup", "load"}, asyncio.Event()
    turn(engine, "q", KEYS[20:21], prefetch="s")
    turn(engine, "p", KEYS[21:22], prefetch="s", session="t", tenant="")
    engine.manager.on_new_request(read_request("t2", {"kvtier": {"session": "t"}}))
    assert not engine.manager.take_receipts(), "that was not the turn of the prefetch's session"
    engine.manager.on_new_request(read_request("s2", {"kvtier": {"session": "s"}}))
    receipts = engine.manager.take_receipts()
    assert [(one.request_id, one.session) for one in receipts] == [("q", "s"), ("p", "s")]
    assert {one.outcome for one in receipts} == {Outcome.EXPIRED}


@pure_core_only
def test_a_prefetch_goes_on_when_the_tier_becomes_faster(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = left_pool(make, resume_in=60, prefetch=True)
    monkeypatch.setattr(TierClient, "expected_load_s", lambda self, chunks: 30.0)
    engine.step()
    monkeypatch.undo()
    engine.step(times=10)
    assert outcomes(engine.manager.take_receipts()) == [("prefetch", "accepted", 6)]


def test_the_policy_hears_of_a_prefetchs_end_in_the_same_step(make: Make) -> None:
    engine = left_pool(make)
    policy = engine.manager._policy
    ended: list[str] = []
    policy.on_request_finished = lambda request, stop: ended.append(  # type: ignore[method-assign]
        request.request_id
    )
    turn(engine, "q", KEYS[20:21], prefetch="s")
    for _ in range(20):
        engine.step()
        if engine.manager.take_receipts():
            break
    assert ended[-1] == "kvtier prefetch 1"


def test_a_prefetch_of_what_is_nowhere_is_refused(make: Make) -> None:
    engine = left_pool(make)
    engine.tiers[0]._remove(KEYS[:6])
    turn(engine, "q", KEYS[20:21], prefetch="s")
    engine.step()
    (receipt,) = engine.manager.take_receipts()
    assert (receipt.outcome, receipt.reason) == (
        Outcome.REFUSED,
        "6 chunks are in no tier, or over the budget",
    )
    (receipt,) = turn(engine, "p", KEYS[21:22], prefetch="nobody")
    assert receipt.reason == "no chunks of session 'nobody' are known"
    (receipt,) = turn(engine, "o", KEYS[21:22], prefetch=True, session="s")
    assert receipt.reason == "it needs 'resume_in', the time of the next turn"


# --- several groups, aborts, and what clients may send ------------------------------------------


def of_group(key: OffloadKey, group: int) -> OffloadKey:
    return make_offload_key(split_offload_key(key)[0], group)


def test_an_ended_sessions_shared_chunks_stay_in_every_group(make: Make) -> None:
    engine = make(slots=16, store_policy="on_evict")
    one = [of_group(key, g) for g in (0, 1) for key in KEYS[:2]]
    turn(engine, "r", one, session="s")
    turn(engine, "q", [one[0], one[2]], session="t")
    turn(engine, "p", one, session="s", end=True)
    flood(engine)
    engine.step(times=30)
    shared, own = {of_group(KEYS[0], g) for g in (0, 1)}, {of_group(KEYS[1], g) for g in (0, 1)}
    assert shared <= set(engine.tiers[0]._objects)
    assert not own & set(engine.tiers[0]._objects)


def test_a_hole_in_one_group_ends_the_prefetch_of_that_group_only(make: Make) -> None:
    engine = make(slots=32, manager={"hint_share": 0.5})
    keys = [of_group(key, g) for g in (0, 1) for key in KEYS[:3]]
    turn(engine, "r", keys, session="s")
    flood(engine)
    engine.tiers[0]._remove([keys[1]])
    engine.manager.clients[0]._known.clear()
    turn(engine, "q", KEYS[20:21], prefetch="s")
    engine.step(times=30)
    assert present(engine, *keys) == [True, False, False, True, True, True]
    assert outcomes(engine.manager.take_receipts()) == [("prefetch", "clipped", 4)]


def test_an_abort_in_the_queue_does_not_forget_the_session(make: Make) -> None:
    engine = left_pool(make)
    aborted = read_request("a1", {"kvtier": {"session": "s"}})
    engine.manager.on_new_request(aborted)
    engine.manager.on_request_finished(aborted, dict.fromkeys(KEYS[:6], 16))
    turn(engine, "q", KEYS[20:21], prefetch="s")
    engine.step(times=20)
    assert all(present(engine, *KEYS[:6]))


def test_what_an_ended_request_stored_is_offered_once_another_uses_it(make: Make) -> None:
    policies = ({"store_policy": "on_evict"}, {})
    engine = make(slots=8, tiers=2, each=policies)
    turn(engine, "r", KEYS[:1], end=True)
    assert engine.settle(A, KEYS[0]) == ["HIT"]
    engine.load(A, KEYS[0])
    flood(engine)
    engine.step(times=20)
    assert all(KEYS[0] in tier._objects for tier in engine.tiers)


def test_with_a_budget_of_0_nothing_is_loaded(make: Make) -> None:
    engine = make(slots=32, manager={"hint_share": 0.0})
    turn(engine, "r", KEYS[:6], session="s")
    flood(engine)
    (receipt,) = turn(engine, "q", KEYS[20:21], prefetch="s")
    assert receipt.reason == "the budget is 0"
    assert "load" not in engine.tiers[0].called()


def test_a_displaced_prefetch_says_that_it_made_room(make: Make) -> None:
    engine = left_pool(make)
    for number in range(256):
        turn(engine, f"q{number}", KEYS[20:21], resume_in=600, prefetch=True)
    receipts = turn(engine, "late", KEYS[20:21], resume_in=600, prefetch=True, tenant="other")
    displaced, own = (one for one in receipts if one.verb is Verb.PREFETCH)
    assert displaced.outcome is Outcome.EXPIRED
    assert displaced.reason == "too many prefetches wait, and other tenants have fewer"
    assert (own.tenant, own.outcome) == ("other", Outcome.DEFERRED)
