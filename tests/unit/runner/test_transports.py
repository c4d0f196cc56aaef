"""Guarantees of all runners, tested with real threads and processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

import pytest
from support.filled import floats
from support.runners import CHUNK_BYTES, KEYS, Make, MisbehavingTier

from kvtier_sdk import (
    ConfigError,
    TierAuthError,
    TierContractError,
    metric_samples,
)
from kvtier_sdk.chunk_header import header_bytes
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.runner.jobs import ChunksRemoved, Operation


def test_what_compression_saves_and_costs_is_reported(make_rig: Make) -> None:
    rig = make_rig(runner={"compress": "always"}).open()
    for chunk, content in enumerate((floats(KEYS[0], CHUNK_BYTES), os.urandom(CHUNK_BYTES))):
        rig.pool.view(chunk)[:] = content
    assert rig.do(Operation.STORE, 0, 1) == ["ok"] * 2
    assert rig.do(Operation.LOAD, 0, 1) == ["ok"] * 2
    stats = rig.client.stats
    assert stats.stored_bytes == stats.loaded_bytes == 2 * CHUNK_BYTES
    plain_bytes = 2 * (header_bytes(MisbehavingTier.alignment) + CHUNK_BYTES)
    assert stats.stored_object_bytes == stats.loaded_object_bytes
    assert 0.1 * CHUNK_BYTES < plain_bytes - stats.stored_object_bytes < 0.5 * CHUNK_BYTES
    assert stats.compress_s > 0
    assert stats.expand_s > 0


def in_a_forked_copy(action: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_copy_shuts_down_and_leaves_the_tier_to_its_parent(make_rig: Make) -> None:
    rig = make_rig(on_load="hang").open()
    assert rig.do(Operation.STORE, 0) == ["ok"]
    rig.submit([rig.job(Operation.LOAD, 0)])
    rig.wait_past("hanging")

    def use_and_close() -> bool:
        rig.submit([rig.job(Operation.STORE, 1)])
        refused = rig.take()[1:] == ["cancelled"]
        rig.client.close(5.0)
        return refused and rig.take()[1:] == ["cancelled"] * 2

    assert in_a_forked_copy(use_and_close)
    assert rig.do(Operation.LOOKUP, 0, 1) == ["ok", "not_found"]
    assert rig.take() == ["ok", "ok"], "the load is still under way"


def test_evictions_are_reported(make_rig: Make) -> None:
    rig = make_rig(capacity=2 * (CHUNK_BYTES + header_bytes(1))).open()
    rig.do(Operation.STORE, 0, 1, 2)
    rig.wait_for(1, others=1)
    (removed,) = rig.others
    assert isinstance(removed, ChunksRemoved)
    assert list(removed.keys) == [KEYS[0]]


def test_reporting_a_removed_text_is_a_contract_error(make_rig: Make) -> None:
    rig = make_rig(on_load="let_go_of_text").open()
    rig.submit([rig.job(Operation.LOAD, 0), *rig.lookups(2)])
    rig.wait_for(3)
    told = {result.verdicts[0].value: result.error for result in rig.results}
    assert told == {
        "contract": "held load: raised TypeError: memoryview: a bytes-like object is required, "
        "not 'str'",
        "not_found": None,
    }
    assert rig.others == []


def test_jobs_before_the_start_and_after_the_end_are_cancelled(make_rig: Make) -> None:
    rig = make_rig()
    rig.submit(rig.lookups(2))
    assert rig.take() == ["cancelled"] * 2
    assert rig.client.drain(0.0) is True
    rig.client.open()
    rig.client.close(5.0)
    rig.submit(rig.lookups(3))
    assert rig.take() == ["cancelled"] * 5
    assert rig.client.drain(0.0) is True
    rig.client.close(5.0)
    assert rig.past() == ["open", "opened", "closed"]


def test_no_job_is_lost_or_doubled_by_a_close(make_rig: Make) -> None:
    rig = make_rig().open()
    jobs = [rig.lookups(1) for _ in range(3000)]
    for batch in jobs[:1000]:
        rig.submit(batch)
    rig.client.close(5.0)
    for batch in jobs[1000:]:
        rig.submit(batch)
    rig.take()
    assert sorted(result.job_id for result in rig.results) == list(range(3000))


@pytest.mark.parametrize(
    ("trouble", "error_class", "message"),
    [
        ("expire", TierAuthError, "held open: the key of Ada expired 3 days ago"),
        ("misconfigure", ConfigError, "tier 'held': option 'bucket' names none"),
        ("exit", TierContractError, "held open: raised SystemExit: 3"),
        (
            "raise_cancelled",
            TierContractError,
            "held open: raised CancelledError without being cancelled",
        ),
        (
            "miss_a_file",
            TierContractError,
            "held open: raised FileNotFoundError: "
            "[Errno 2] No such file or directory: '/nonexistent'",
        ),
    ],
)
def test_a_tier_that_does_not_open_is_closed(
    make_rig: Make, trouble: str, error_class: type[Exception], message: str
) -> None:
    rig = make_rig(on_open=trouble)
    with pytest.raises(error_class) as told:
        rig.client.open()
    assert str(told.value) == message
    if isinstance(told.value, TierAuthError):
        assert vars(told.value)["days"] == 3
        assert (told.value.tier, told.value.operation) == ("held", "open")
    assert rig.past() == ["open", "closed"]
    rig.submit(rig.lookups(1))
    assert rig.take() == ["cancelled"]


@pytest.mark.parametrize("trouble", ["misbehave", "panic"])
def test_what_a_tier_raises_when_it_is_closed_is_in_its_log(
    make_rig: Make, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    rig = make_rig(on_close=trouble).open()
    rig.client.close(5.0)
    assert "closing the tier failed" in caplog.text
    assert not rig.runner.is_running  # type: ignore[attr-defined]


def test_an_interrupted_opening_is_closed(make_rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(on_open="hang", close_s=0.1)

    def interrupt(timeout_s: float | None = None) -> None:
        rig.wait_past("hanging")
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.runner._opened, "result", interrupt)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        rig.client.open()
    assert rig.past() == ["open", "hanging", "cancelled", "closed"]


@pytest.mark.parametrize("trouble", ["exit_in_task", "stop_the_loop"])
def test_a_tier_cannot_end_its_loop(make_rig: Make, trouble: str) -> None:
    rig = make_rig(on_lookup=trouble).open()
    rig.submit(rig.lookups(3))
    assert rig.wait_for(3) == ["not_found"] * 3
    rig.submit(rig.lookups(1))
    assert rig.wait_for(4) == ["not_found"] * 4
    assert rig.others == []


def test_draining_says_whether_all_has_ended(make_rig: Make) -> None:
    rig = make_rig(on_lookup="block").open()
    assert rig.client.drain(0.01) is True
    rig.submit(rig.lookups(1))
    rig.wait_past("blocking")
    assert rig.client.drain(0.01) is False
    rig.unblock()
    assert rig.wait_for(1)
    assert rig.client.drain(5.0) is True


def test_what_a_tier_logs_is_in_its_log(make_rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvtier.tier.held"):
        rig = make_rig(on_lookup="warn")
        rig.client.open()
        rig.do(Operation.LOOKUP, 0)
        rig.client.close(5.0)
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert lines == [("kvtier.tier.held", "90 percent full")]


def test_an_endless_call_blocks_no_close(make_rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(on_lookup="block").open()
    rig.submit(rig.lookups(2))
    rig.wait_past("blocking")
    with caplog.at_level(logging.WARNING, logger="kvtier.tier.held"):
        rig.client.close(0.01)
    rig.submit(rig.lookups(2))
    assert rig.take() == ["cancelled"] * 4
    if isinstance(rig.runner, ThreadRunner):
        assert "did not close within 0.01 s; its thread is left behind" in caplog.text
        assert rig.client.jobs.unreleased == 2, "those may still touch their slots"
    else:
        assert "did not close within 0.01 s; its process is killed" in caplog.text
        assert all(result.released for result in rig.results)


def test_counters_and_gauges_of_the_backend_arrive(make_rig: Make) -> None:
    rig = make_rig().open()
    assert rig.do(Operation.STORE, 0, 1) == ["ok"] * 2
    for _ in range(3):
        rig.do(Operation.LOOKUP, 0)
    rig.client.close(5.0)
    rig.client.poll()
    seen = {
        (sample.metric.name, *sample.labels): sample.value
        for sample in metric_samples([rig.client.stats])
    }
    assert seen["kvtier_backend_counter_total", "held", "lookups"] == 3
    assert seen["kvtier_backend_gauge", "held", "stored_chunks"] == 2


def test_the_state_of_a_tier_is_known_to_a_thread_that_does_not_poll(make_rig: Make) -> None:
    rig = make_rig().open()
    assert rig.do(Operation.STORE, 0, 1) == ["ok"] * 2
    rig.client.stats.backend_gauges.clear()
    for _ in range(6000):
        if rig.client.stats_now().backend_gauges:
            break
        threading.Event().wait(0.005)
    assert rig.client.stats_now().backend_gauges == {"stored_chunks": 2}
    assert rig.client.stats.backend_gauges == {}, "the engine has not polled"
    rig.client.poll()
    assert rig.client.stats.backend_gauges == {"stored_chunks": 2}, "and finds it all the same"
