from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import expm1, inf
from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.workloads import count_hits, generate

from kvtier_sdk import OffloadKey, RequestContext, load_policy
from kvtier_sdk.cli.replay import ReplayRequest
from kvtier_sdk.policies.returns import ReturnsPolicy, _Rates


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("chats", 300),
        ("loop", 1500),
        ("scans", 400),
        ("popular", 1000),
        ("agents", 1000),
        ("many agents", 500),
        ("pauses", 2000),
        ("phases", 3000),
    ],
)
def test_it_hits_no_less_than_lru_and_arc(name: str, slots: int) -> None:
    workload = generate(name, 4000, seed=1)
    hits = {
        policy: count_hits(workload, load_policy(policy)(), slots)
        for policy in ("lru", "arc", "returns")
    }
    assert hits["returns"] >= 0.99 * max(hits["lru"], hits["arc"]), hits


def sessions(count: int, seed: int) -> list[ReplayRequest]:
    """Return the turns of sessions. With probability 1/2, a turn is the last of its session."""
    rng = random.Random(seed)
    turns = []
    for session in range(count):
        at_s, prompt = rng.uniform(0, 20 * count), 10
        while True:
            is_last = rng.random() < 0.5
            keys = tuple(b"%06d-%06d-tail" % (session, n) for n in range(prompt))
            stop = "end_turn" if is_last else "tool_use"
            turns.append(
                ReplayRequest(
                    f"{session}-{prompt}",
                    keys,
                    None,
                    at_s,
                    str(session),
                    stop,
                    inf if is_last else 100,
                )
            )
            if is_last:
                break
            at_s, prompt = at_s + rng.expovariate(1 / 100), prompt + 2
    return sorted(turns, key=lambda turn: turn.arrived_s)


def test_it_learns_from_the_stop_which_sessions_go_on() -> None:
    workload = sessions(500, seed=1)
    untold = [replace(turn, stop=None, resume_in_s=None) for turn in workload]
    by_stop = [replace(turn, resume_in_s=None) for turn in workload]
    lru = count_hits(untold, load_policy("lru")(), 40)
    assert count_hits(untold, ReturnsPolicy(), 40) >= 0.97 * lru
    assert count_hits(by_stop, ReturnsPolicy(), 40) > 1.3 * lru
    assert count_hits(workload, ReturnsPolicy(), 40) > 1.3 * lru


def opened(slots: int) -> ReturnsPolicy:
    policy = ReturnsPolicy()
    policy.open(slots)
    return policy


def turn(
    policy: ReturnsPolicy, name: str, keys: Sequence[OffloadKey], resume_in_s: float | None = None
) -> None:
    request = RequestContext(name, resume_in_s=resume_in_s)
    policy.on_access([key for key in keys if key in policy._groups], request)
    policy.on_insert([key for key in keys if key not in policy._groups], request)
    policy.on_request_finished(request, None)
    policy.now_s += 1


def test_what_other_conversations_need_outlives_the_end_of_one() -> None:
    policy = opened(8)
    turn(policy, "stays", [b"system", b"a", b"b", b"c"])
    turn(policy, "ends", [b"system", b"d"], resume_in_s=inf)
    order = policy.choose_victims(5, lambda key: True)
    assert order[0] == b"d"
    assert order[-1] == b"system"


def test_a_conversation_that_has_just_ended_leaves_first() -> None:
    policy = opened(8)
    turn(policy, "stays", [b"a", b"b"])
    assert policy.choose_victims(1, lambda key: True) == [b"b"]
    turn(policy, "ends", [b"c", b"d"], resume_in_s=inf)
    assert policy.choose_victims(2, lambda key: True) == [b"d", b"c"]


def test_a_conversation_that_waited_long_is_expected_to_wait_long_again() -> None:
    policy = opened(256)
    turns = [(f"slow {n}", at_s + n) for n in range(20) for at_s in range(1000, 21_000, 1000)]
    turns += [("fast", at_s) for at_s in range(12, 20_032, 10)]
    for number, (name, at_s) in enumerate(sorted(turns, key=itemgetter(1))):
        policy.now_s = at_s
        turn(policy, str(number), [b"%s %d" % (name.encode(), n) for n in range(2)])
    # Without separate rates for each pace, some slow conversations would outlive the fast one.
    assert policy.choose_victims(42, lambda key: True)[-2:] == [b"fast 1", b"fast 0"]


def test_rates_of_which_little_is_known_follow_their_base() -> None:
    base = _Rates()
    known = _Rates(base)
    base.note(10, 0.0, 1000.0)
    known.note(10, 50.0, 100.0)
    base.renew()
    known.renew()
    # ``base`` includes the returns noted in ``known``; otherwise the rate of ``base`` would be 0.
    assert 0.03 < base.worths[10] < known.worths[10] / 3
    assert _Rates(base).worths == pytest.approx(base.worths)


@given(st.lists(st.tuples(st.integers(0, 39), st.floats(0, 50), st.floats(0, 1e4)), max_size=20))
def test_the_worth_is_the_best_rate_of_all_times_to_wait(
    events: list[tuple[int, float, float]],
) -> None:
    rates = _Rates()
    for bucket, returned, waited in events:
        rates.note(bucket, returned, waited)
    rates.renew()
    hazards, assumed = [], 0.1
    for bucket in range(40):
        begin, end = 2 ** (bucket / 2) if bucket else 0.0, 2 ** ((bucket + 1) / 2)
        returned = sum(returned for of, returned, _ in events if of == bucket)
        waited = sum(waited for of, _, waited in events if of == bucket)
        hazards.append(((returned + assumed) / (waited + end - begin), end - begin))
        assumed = (0.1 + hazards[-1][0] * (end - begin)) / 2
    for first in range(40):
        left, returns, time, best = 1.0, 0.0, 0.0, 0.0
        for rate, width in hazards[first:]:
            gone = -expm1(-rate * width)
            returns, time, left = (
                returns + left * gone,
                time + left * gone / rate,
                left * (1 - gone),
            )
            best = max(best, returns / time)
        assert rates.worths[first] == pytest.approx(best, rel=1e-6)


def test_a_running_request_leaves_last() -> None:
    policy = opened(8)
    policy.on_insert([b"a", b"b"], RequestContext("runs"))
    turn(policy, "waits", [b"c"])
    assert policy.choose_victims(3, lambda key: True) == [b"c", b"b", b"a"]


@pytest.mark.parametrize("parts", [["cdab"], ["cd", "ab"], ["d", "b", "c", "a"]])
def test_loaded_chunks_may_arrive_in_any_order_and_in_parts(parts: list[str]) -> None:
    policy = opened(16)
    turn(policy, "first", [b"a", b"b", b"c", b"d", b"e"])
    for key in (b"e", b"d", b"c", b"b", b"a"):
        policy.on_remove(key)
    request = RequestContext("again")
    for part in parts:
        policy.on_insert([key.encode() for key in part], request)
    policy.on_access([b"a", b"b", b"c", b"d"], request)
    policy.on_request_finished(request, None)
    assert policy.choose_victims(4, lambda key: True) == [b"d", b"c", b"b", b"a"]
    # Only chunk e was left behind.
    assert [kind.label for kind in policy._kinds.values()] == ["", "left behind", ""]


#: Requests as paths in a small prefix tree; a chunk's key depends on the chunks before it.
PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=60)


@given(PATHS, st.integers(6, 12), st.floats(0.1, 100))
def test_the_end_of_a_prefix_leaves_before_its_start(
    paths: list[list[int]], slots: int, pause_s: float
) -> None:
    workload = [
        ReplayRequest(
            str(n),
            tuple(bytes(path[:end]) for end in range(1, len(path) + 1)),
            arrived_s=n * pause_s,
            stop=str(len(path)),
        )
        for n, path in enumerate(paths)
    ]
    policy = ReturnsPolicy()
    count_hits(workload, policy, slots)
    order = list(policy.choose_victims(slots, lambda key: True))
    for place, key in enumerate(order):
        assert key[:-1] not in order[:place]


def test_memory_is_bounded_however_many_chunks_pass() -> None:
    slots = 512
    policy = opened(slots)
    rng = random.Random(0)
    for n in range(25 * slots):
        keys = [rng.randbytes(36) for _ in range(4)]
        over = len(policy._groups) + len(keys) - slots
        for victim in policy.choose_victims(max(0, over), lambda key: True):
            policy.on_remove(victim)
        turn(policy, str(n), keys)
    assert len(policy._ghosts) <= 6 * slots
    waiting = [
        group
        for cells in (*policy._waiting, *policy._gone)
        for cell in cells.values()
        for group in cell
    ]
    assert len(waiting) <= (7 * slots + 64 * 4) // 4
    assert not policy._turns


def test_a_return_is_counted_however_many_turns_came_before() -> None:
    policy = opened(8)
    turn(policy, "first", [b"a"])
    policy.now_s = 600.0
    for n in range(64 * 2000):
        policy.on_request_finished(RequestContext(str(n)), None)
    turn(policy, "again", [b"a"])
    assert policy.choose_victims(1, lambda key: True) == [b"a"]
    assert all(worth > 0 for rates in policy._rates.values() for worth in rates.worths)
