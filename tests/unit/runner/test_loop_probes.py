from __future__ import annotations

import itertools
import re

import pytest
from support.scripted_loop import LOAD, LOOKUP, STORE, Act, Make, Rig, failing

from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.health import CANARY_KEY
from kvtier_sdk.runner.jobs import Operation


def refusing(make: Make, operation: str) -> Rig:
    rig = make(retries=0)
    failing(rig, operation)
    return rig


@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
def test_it_closes_by_itself_when_the_tier_works_again(make: Make, operation: str) -> None:
    rig = refusing(make, operation)
    direction = Direction.WRITE if operation == "store" else Direction.READ
    rig.run_for(10.0)
    assert rig.account.breakers[direction] is BreakerState.OPEN
    times = [0.05, *(at_s for name, at_s in rig.tier.probes if name == operation)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == [pytest.approx(pause, rel=0.12) for pause in (1, 2, 4)]
    rig.tier.always.clear()
    rig.run_for(8.0)
    assert rig.account.breakers[direction] is BreakerState.CLOSED
    states = [move.state.value for move in rig.account.moves]
    assert states == ["open", *["half_open", "open"] * 3, "half_open", "closed"]
    # In the next outage the pauses start at one second again.
    rig.tier.probes.clear()
    failing(rig, operation)
    began_s = rig.clock.now_s()
    rig.tier.always.clear()
    rig.run_for(1.0)
    assert rig.account.breakers[direction] is BreakerState.CLOSED
    assert rig.tier.probes[0][1] - began_s <= 1.0


def test_a_read_probe_looks_up_and_loads(make: Make) -> None:
    rig = refusing(make, "lookup")
    rig.tier.always = {"load": Act("unavailable")}
    rig.run_for(1.1)
    assert [name for name, _ in rig.tier.probes] == ["lookup", "load"]
    assert rig.account.breakers[Direction.READ] is BreakerState.OPEN


def test_a_write_probe_leaves_nothing_behind_and_nobody_hears_of_it(make: Make) -> None:
    rig = refusing(make, "store")
    rig.tier.always.clear()
    rig.run_for(1.1)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED
    assert [name for name, _ in rig.tier.probes] == ["store"]
    assert CANARY_KEY not in rig.tier.stored
    assert rig.account.removed == []
    rig.tier.context.report_removed([CANARY_KEY, b"other"])
    assert rig.account.removed == [b"other"]


def test_a_slow_first_answer_closes_it_if_the_next_is_in_time(make: Make) -> None:
    rig = refusing(make, "lookup")
    rig.tier.always.clear()
    # The first answer of a tier that must reconnect may come after a lookup's deadline.
    rig.tier.script = iter([Act(after_s=0.5)])
    rig.run_for(1.6)
    assert [name for name, _ in rig.tier.probes] == ["lookup", "lookup", "load"]
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


def test_a_tier_that_stays_too_slow_for_lookups_stays_refused(make: Make) -> None:
    rig = refusing(make, "lookup")
    rig.tier.always["lookup"] = Act(after_s=0.2)
    rig.run_for(60.0)
    assert rig.account.breakers[Direction.READ] is not BreakerState.CLOSED
    assert "load" not in [name for name, _ in rig.tier.probes]


def test_a_probe_that_hangs_is_given_up_and_never_doubled(make: Make) -> None:
    rig = refusing(make, "lookup")
    rig.tier.always["lookup"] = Act(after_s=50.0, stubborn=True)
    rig.run_for(2.1)
    assert [move.state.value for move in rig.account.moves] == ["open", "half_open", "open"]
    rig.run_for(40.0)
    assert len(rig.tier.probes) == 1
    rig.tier.always.clear()
    rig.run_for(10.0 + 30.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


NEVER = Act(after_s=1e6, stubborn=True)
STAY_REFUSED = "stay refused: {}, and nothing but the end of the process ends them"


@pytest.mark.parametrize(("operation", "hung"), [(LOAD, 4), (STORE, 3)])
@pytest.mark.parametrize("interval_s", [0.1, 1.0, 20.0])
def test_calls_that_never_end_are_given_up_after_a_minute(
    make: Make, caplog: pytest.LogCaptureFixture, operation: Operation, hung: int, interval_s: float
) -> None:
    rig = make(*[NEVER] * hung, concurrency=4, breaker_failures=hung, probe_interval=interval_s)
    for _ in range(hung):
        rig.ask(operation, within_s=2.0)
    rig.run_for(2.0 + 50.0)
    assert rig.given_up_s == []
    assert "stay refused" not in caplog.text
    rig.run_for(1000.0)
    (given_up_s,) = rig.given_up_s
    # The SDK gives up once the pauses between probes add up to 60 s. Each pause has some jitter.
    assert 2.0 + 54.0 <= given_up_s <= 2.0 + 90.0
    told = STAY_REFUSED.format("calls that hang leave no room for another")
    assert caplog.text.count(f"tier: {'writes' if operation is STORE else 'reads'} {told}") == 1


def test_a_probe_that_never_ends_is_given_up(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = refusing(make, "lookup")
    rig.tier.always["lookup"] = NEVER
    rig.run_for(50.0)
    assert rig.given_up_s == []
    rig.run_for(1000.0)
    assert len(rig.given_up_s) == 1
    assert len(rig.tier.probes) == 1
    assert caplog.text.count(STAY_REFUSED.format("a probe hangs")) == 1


def test_calls_that_are_slow_to_end_are_not_given_up(make: Make) -> None:
    rig = make(concurrency=2, breaker_failures=2)
    rig.tier.always[""] = Act("timeout", after_s=50.0, stubborn=True)
    for _ in range(30):
        rig.ask(LOAD, within_s=2.0, run_s=20.0)
    assert len(rig.tier.probes) > 3
    assert rig.given_up_s == []
    assert rig.account.breakers[Direction.READ] is not BreakerState.CLOSED
    rig.tier.always.clear()
    rig.run_for(80.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


def test_a_slow_tier_gets_its_chance_as_pauses_grow(make: Make) -> None:
    rig = refusing(make, "store")
    rig.tier.always["store"] = Act(after_s=3.0)
    rig.run_for(15.0)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED


def test_a_tier_in_quarantine_has_no_breaker_and_no_probes(make: Make) -> None:
    rig = refusing(make, "lookup")
    rig.tier.script = iter([Act("too few")])
    rig.run_for(100.0)
    assert len(rig.tier.probes) == 1
    assert [move.state.value for move in rig.account.moves] == ["open", "half_open", "open"]
    assert rig.do(LOOKUP) == ["contract"]
    for _ in range(20):
        rig.ask(STORE, run_s=0.1)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED


def test_a_probe_that_fails_inside_the_sdk_is_a_failed_probe(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = refusing(make, "store")

    def broken(*args: object) -> None:
        raise RuntimeError("no hash for you")

    with monkeypatch.context() as patch:
        patch.setattr(rig.loop._mover._header, "seal", broken)
        rig.run_for(1.1)
    assert "a probe failed inside the SDK" in caplog.text
    rig.tier.always.clear()
    rig.run_for(2.1)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED


def test_the_log_says_each_change_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make(retries=0)
    caplog.set_level("INFO", logger="kvtier.tier.tier")
    failing(rig, "lookup", calls=20)
    rig.tier.always.clear()
    rig.run_for(2.0)
    lines = [record.getMessage() for record in caplog.records if "reads" in record.getMessage()]
    refused, taken = lines
    assert refused == (
        "tier: reads are refused until a probe succeeds; the last failure: tier lookup: refused"
    )
    assert re.fullmatch(r"tier: reads are taken again, after (9\d\d ms|1 s)", taken)
