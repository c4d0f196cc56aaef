from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.scripted_loop import CHUNK_BYTES, ERRORS, LOAD, LOOKUP, STORE, Act, Make, ScriptedTier

from kvtier_sdk import OffloadKey
from kvtier_sdk.chunk_header import header_bytes
from kvtier_sdk.runner.jobs import Operation


def test_an_error_of_the_sdk_fails_one_batch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(max_batch="1B")
    job = rig.job(STORE, 3)
    memory = rig.loop._mover._memory
    padded_view = memory.padded_view

    def break_one(slot: int, *arguments: Any) -> memoryview:
        if slot == job.slots[1]:
            raise RuntimeError("no view for you")
        return padded_view(slot, *arguments)

    monkeypatch.setattr(memory, "padded_view", break_one)
    rig.submit(job)
    rig.run_for(0.1)
    assert rig.account.verdicts(job.job_id) == ["ok", "failed", "ok"]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("bug", "contract"),
        ("exit", "contract"),
        ("panic", "contract"),
        ("raises cancelled", "contract"),
        ("cancels itself", "cancelled"),
        ("too few", "contract"),
        ("nonsense", "contract"),
        ("faulty", "failed"),
        *[(kind, kind.replace(" ", "_")) for kind in ERRORS if kind not in ("faulty", "try again")],
    ],
)
def test_what_a_tier_does_has_its_verdict(make: Make, kind: str, verdict: str) -> None:
    rig = make(Act(kind), retries=0)
    assert rig.do(LOAD) == [verdict]


def test_retries_are_counted(make: Make) -> None:
    rig = make(Act("try again"), Act("try again"))
    assert rig.account.results[rig.ask(STORE, run_s=1.0).job_id].retries == 2
    assert rig.account.results[rig.ask(STORE, run_s=1.0).job_id].retries == 0
    rig.tier.script = iter([Act("try again")])
    assert rig.account.results[rig.ask(LOOKUP, run_s=1.0).job_id].retries == 1


def test_the_bytes_of_a_chunk_count_once_and_only_if_it_succeeds(make: Make) -> None:
    rig = make(Act("mixed"))
    verdicts = rig.do(STORE, keys=len(ERRORS) + 2)
    # The first and the last chunk succeed at the first call, and three chunks at the second.
    assert verdicts.count("ok") == 5
    (result,) = rig.account.results.values()
    assert result.moved_bytes == 5 * CHUNK_BYTES
    assert result.object_bytes == 5 * (header_bytes(1) + CHUNK_BYTES)


def test_stores_that_hang_leave_calls_to_loads(make: Make) -> None:
    rig = make(concurrency=4)
    rig.tier.always["store"] = Act(after_s=20.0)
    stores = [rig.ask(STORE, within_s=30.0) for _ in range(8)]
    rig.run_for(0.1)
    assert len(rig.tier.calls) == 3
    load = rig.ask(LOAD, run_s=0.1)
    assert rig.account.verdicts(load.job_id) == ["not_found"]
    assert not any(store.job_id in rig.account.results for store in stores)


def test_loads_do_not_wait_for_verification(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(concurrency=1)
    stored = [rig.ask(STORE, run_s=0.1) for _ in range(2)]
    header, calls_made = rig.loop._mover._header, []
    check = header.check

    def check_late(key: OffloadKey, *parts: memoryview) -> None:
        calls_made.append([operation for operation, _ in rig.tier.calls].count("load"))
        check(key, *parts)

    monkeypatch.setattr(header, "check", check_late)
    rig.tier.always["load"] = Act(after_s=0.1)
    loads = [rig.job(LOAD, names=job.keys) for job in stored]
    rig.submit(*loads)
    rig.run_for(1.0)
    assert [rig.account.verdicts(job.job_id) for job in loads] == [["ok"], ["ok"]]
    assert calls_made == [2, 2]


def test_hanging_deletes_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(concurrency=2)
    stored = [rig.ask(STORE, run_s=0.1) for _ in range(8)]
    for job in stored:
        rig.tier.stored[job.keys[0]] = bytes(len(rig.tier.stored[job.keys[0]]))
    monkeypatch.setattr(rig.tier, "delete", lambda keys: rig.tier.let_go.wait())
    loads = [rig.job(LOAD, names=job.keys) for job in stored]
    rig.submit(*loads)
    rig.run_for(1.0)
    # The first two calls end before their damaged chunks are deleted, so two more loads begin. The
    # others wait for the hanging deletes.
    assert [operation for operation, _ in rig.tier.calls].count("load") == 4


def test_draining_does_not_end_an_opening(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    monkeypatch.setattr(rig.tier, "open", rig.tier.let_go.wait)
    opening = rig.event_loop.create_task(rig.loop.open())
    assert rig.run(rig.loop.drain(1.0)) is True
    assert not opening.done()
    rig.tier.let_go.set()
    rig.run(opening)


def test_draining_cancels_what_waits_and_lets_finish_what_runs(make: Make) -> None:
    rig = make(Act(after_s=1.0), concurrency=1)
    running, waiting = rig.ask(STORE), rig.ask(STORE)
    rig.run_for(0.1)
    assert rig.run(rig.loop.drain(5.0)) is True
    assert rig.account.verdicts(running.job_id) == ["ok"]
    assert rig.account.verdicts(waiting.job_id) == ["cancelled"]


def test_at_its_deadline_a_job_ends_and_its_calls_are_cancelled(make: Make) -> None:
    rig = make()
    rig.tier.always["load"] = Act(after_s=40.0)
    easy = rig.ask(LOAD, within_s=2.0)
    rig.tier.always["load"] = Act(after_s=40.0, stubborn=True)
    stubborn = rig.ask(LOAD, within_s=2.0)
    rig.run_for(2.1)
    for job in (easy, stubborn):
        assert rig.account.verdicts(job.job_id) == ["timeout"]
        assert not rig.account.results[job.job_id].released
    assert rig.account.released == {easy.job_id}, "the other still reads into its slot"
    rig.run_for(40.0)
    assert rig.account.released == {easy.job_id, stubborn.job_id}


def test_headers_come_back_whatever_becomes_of_a_call(make: Make) -> None:
    one_header = {"concurrency": 1, "max_batch": 1}
    rig = make(retries=0, breaker_failures=1000, breaker_window=1000, **one_header)
    for kind in ("fine", "bug", "exit", "unavailable", "cancels itself"):
        rig.tier.always["load"] = Act(kind)
        for _ in range(40):
            rig.ask(LOAD, run_s=0.1)
    rig.tier.always["load"] = Act(after_s=40.0)
    for _ in range(40):
        rig.ask(LOAD, within_s=0.1, run_s=0.2)
    rig.tier.always["load"] = Act()
    last = rig.ask(LOAD, run_s=0.1)
    assert rig.account.verdicts(last.job_id) == ["not_found"]


@pytest.mark.parametrize("operation", [LOAD, STORE])
def test_hanging_calls_keep_their_buffers(make: Make, operation: Operation) -> None:
    rig = make(concurrency=2, max_batch=1, breaker_failures=1000)
    rig.tier.always[operation.value] = Act(after_s=20.0, stubborn=True)
    hung = [rig.ask(operation, within_s=1.0) for _ in range(2)]
    rig.run_for(1.5)
    assert [rig.account.verdicts(job.job_id) for job in hung] == [["timeout"]] * 2
    rig.tier.always[operation.value] = Act()
    waiting = rig.job(operation, keys=5, within_s=60.0)
    rig.submit(waiting)
    rig.run_for(5.0)
    assert waiting.job_id not in rig.account.results
    rig.run_for(20.0)
    assert len(set(rig.account.verdicts(waiting.job_id)) - {"ok", "not_found"}) == 0


def test_closing_without_draining_cancels_everything(make: Make) -> None:
    rig = make(concurrency=1)
    rig.tier.always["store"] = Act(after_s=3.0, stubborn=True)
    jobs = [rig.ask(STORE), rig.ask(STORE), rig.ask(LOOKUP)]
    rig.run_for(0.1)
    rig.run(rig.loop.close())
    rig.submit(late := rig.job(LOAD))
    for job in (jobs[0], jobs[1], late):
        assert rig.account.verdicts(job.job_id) == ["cancelled"]
    assert rig.account.released == {1, 2, 3}, "the first store's I/O still runs"
    rig.run_for(5.0)
    assert 0 in rig.account.released


@pytest.mark.parametrize(("call_s", "in_mid_call"), [(3.0, False), (30.0, True)])
def test_a_tier_is_closed_after_its_calls(make: Make, call_s: float, in_mid_call: bool) -> None:
    rig = make()
    rig.tier.always["store"] = Act(after_s=call_s, stubborn=in_mid_call)
    rig.ask(STORE, run_s=0.1)
    rig.run(rig.loop.close())
    assert rig.tier.closed_in_mid_call == in_mid_call
    assert rig.clock.now_s() < 5.0


async def open_with_metrics(tier: ScriptedTier) -> None:
    await ScriptedTier.open(tier)
    tier.context.counter("lookups")
    tier.context.gauge("open").set(1)


async def count_lookup(tier: ScriptedTier, *arguments: Any) -> Sequence[bool]:
    tier.context.counter("lookups").add()
    return await ScriptedTier.lookup(tier, *arguments)


async def close_with_metrics(tier: ScriptedTier) -> None:
    tier.context.gauge("open").set(0)
    await ScriptedTier.close(tier)


def test_changes_are_reported_once_a_second_and_at_the_end(make: Make) -> None:
    def told() -> list[tuple[dict[str, float], dict[str, float]]]:
        return [(dict(report.counters), dict(report.gauges)) for report in rig.account.metrics]

    methods = {"open": open_with_metrics, "lookup": count_lookup, "close": close_with_metrics}
    rig = make(declares=methods)
    assert told() == [({"lookups": 0.0}, {"open": 1.0})]
    for _ in range(3):
        rig.ask(LOOKUP, run_s=0.2)
    assert len(told()) == 1
    rig.run_for(10.0)
    assert told()[1:] == [({"lookups": 3.0}, {})]
    rig.ask(LOOKUP, run_s=0.01)
    rig.run(rig.loop.close())
    assert told()[2:] == [({"lookups": 1.0}, {"open": 0.0})]
