"""The process runner: deaths on either side, secrets, and what cannot run in a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretBytes
from support.live import live
from support.runners import CHUNK_BYTES, KEYS, NOBODY, RUNNERS, Rig, ScriptedConfig, ScriptedTier

from kvtier_sdk import (
    BackendLoadError,
    ConfigError,
    HostPool,
    Locality,
    Medium,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    PoolLayout,
    RunnerOptions,
    SystemClock,
    TieringConfig,
    TierSpec,
    TierUnavailableError,
    open_pool,
)
from kvtier_sdk.aio.clock import TimerHandle
from kvtier_sdk.metrics import metric_samples
from kvtier_sdk.runner import ProcessRunner, ThreadRunner, TierRunner
from kvtier_sdk.runner.factory import make_runner
from kvtier_sdk.runner.jobs import Job, Operation, ProcessRestarted, RunnerStopped
from kvtier_sdk.runner.process import supervisor
from kvtier_sdk.runner.process.supervisor import RestartPauses

TESTS = Path(__file__).parents[3]


class HeldBackClock(SystemClock):
    """Pauses of a second and more last until they are let go of, and are noted."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self._turns = threading.Semaphore(0)
        self.paused = threading.Event()

    async def sleep(self, delay_s: float) -> None:
        if delay_s < 1.0:
            await asyncio.sleep(delay_s)
            return
        self.pauses_s.append(delay_s)
        self.paused.set()
        while not self._turns.acquire(blocking=False):
            await asyncio.sleep(0.002)

    def go_on(self) -> None:
        """End one pause."""
        self.paused.clear()
        self._turns.release()


class LookClock(HeldBackClock):
    """The engine looks after a process when it is told to, and then believes jobs to be late."""

    def __init__(self) -> None:
        super().__init__()
        self._looks: queue.Queue[tuple[asyncio.AbstractEventLoop, Callable[..., object]]] = (
            queue.Queue()
        )
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        if callback.__name__ != "_ping":
            return super().call_at(when_s, callback, *args)
        self._looks.put((asyncio.get_running_loop(), callback))
        return super().call_at(when_s + 10_000, lambda: None)

    @property
    def looks(self) -> int:
        """How many looks are due."""
        return self._looks.qsize()

    def look(self) -> None:
        """Look once; the look before is over."""
        event_loop, callback = self._looks.get(timeout=30)
        event_loop.call_soon_threadsafe(callback)


@pytest.fixture
def clock() -> HeldBackClock:
    return HeldBackClock()


@pytest.fixture
def make_rig(tmp_path: Path, clock: HeldBackClock) -> Iterator[Callable[..., Rig]]:
    """Make a process runner around a scripted tier; it is at an end with the test."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig("process", tmp_path, **{"clock": clock, **options}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def pid_of(runner: TierRunner) -> int:
    assert isinstance(runner, ProcessRunner)
    assert runner.pid is not None
    return runner.pid


def is_there(pid: int) -> bool:
    """Whether a process runs; one that is dead and not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# --- the process dies -------------------------------------------------------------------------


def test_a_killed_process_fails_its_jobs_and_is_restarted(
    make_rig: Callable[..., Rig], clock: HeldBackClock
) -> None:
    rig = make_rig(on_load="hang")
    rig.client.open()
    first = pid_of(rig.runner)
    rig.do(Operation.STORE, 0)
    rig.submit([rig.job(Operation.LOAD, 0, 1), rig.job(Operation.LOAD, 2)])
    rig.wait_past("hanging")
    os.kill(first, signal.SIGKILL)
    rig.wait_for(3, others=1)
    died = rig.results[1:]
    assert [v.value for result in died for v in result.verdicts] == ["unavailable"] * 3
    assert all(result.released for result in died)
    assert {result.error for result in died} == {
        "held load: the tier's process died: signal 9 (killed, perhaps for want of memory)"
    }
    assert not is_there(first), "slots are free, so nobody may write to them any more"
    assert not rig.client.takes_reads
    assert not rig.client.takes_stores
    # Nothing waits for the next one.
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
    assert clock.paused.wait(30)
    clock.go_on()
    rig.wait_for(4, others=2)
    assert [type(report) for report in rig.others] == [RunnerStopped, ProcessRestarted]
    assert rig.client.takes_reads
    assert rig.client.takes_stores
    assert pid_of(rig.runner) != first
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"], "this tier's chunks went with it"
    rig.pool.view(3)[:] = b"x" * CHUNK_BYTES
    assert rig.do(Operation.STORE, 3) == ["ok"]
    assert rig.do(Operation.LOOKUP, 3) == ["ok"]


def test_a_process_that_dies_with_jobs_unread(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """Its end of the socket is reset then, not only closed."""
    rig = make_rig()
    rig.client.open()
    os.kill(pid_of(rig.runner), signal.SIGSTOP)
    rig.submit(rig.lookups(3))
    os.kill(pid_of(rig.runner), signal.SIGKILL)
    assert rig.wait_for(3) == ["unavailable"] * 3
    rig.close()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert told == ["held: the tier's process died: signal 9 (killed, perhaps for want of memory)"]


def test_io_that_hung_has_ended_with_its_process(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(on_load="block")
    rig.client.open()
    job = rig.job(Operation.LOAD, 0)
    job.deadline_s = rig.clock.now_s() + 0.05
    other = rig.job(Operation.LOAD, 1)
    rig.submit([job])
    rig.wait_past("blocking")
    rig.submit([other])
    os.kill(pid_of(rig.runner), signal.SIGKILL)
    rig.wait_for(2, others=1)
    assert {result.job_id for result in rig.results} == {job.job_id, other.job_id}
    assert all(result.released for result in rig.results)
    assert rig.client.jobs.unreleased == 0


def test_no_slot_is_free_while_the_process_lives(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(on_load="hang_up")
    rig.client.open()
    child = pid_of(rig.runner)
    rig.submit([rig.job(Operation.LOAD, 0)])
    assert rig.wait_for(1) == ["unavailable"]
    assert not is_there(child)


def test_a_copy_that_a_process_left_is_not_waited_for(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(on_load="leave_a_copy")
    rig.client.open()
    assert rig.do(Operation.LOAD, 0) == ["unavailable"]
    assert rig.results[0].error == "held load: the tier's process died: exit status 7"


def test_a_concluded_job_is_released_with_its_process(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(on_load="cling")
    rig.client.open()
    job = rig.job(Operation.LOAD, 0)
    job.deadline_s = rig.clock.now_s() + 0.05
    rig.submit([job])
    assert rig.wait_for(1) == ["timeout"]
    assert not rig.results[0].released
    os.kill(pid_of(rig.runner), signal.SIGKILL)
    assert rig.client.jobs.unreleased == 1
    rig.wait_for(1, others=1)
    assert rig.client.jobs.unreleased == 0


@pytest.mark.parametrize(
    ("trouble", "reason"), [("crash", "signal 11"), ("leave", "exit status 7")]
)
def test_it_is_said_what_a_process_died_of(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture, trouble: str, reason: str
) -> None:
    rig = make_rig(on_lookup=trouble)
    rig.client.open()
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
    assert rig.results[0].error == f"held lookup: the tier's process died: {reason}"
    assert f"the tier's process died: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("trouble", "reason"), [("crash", "signal 11"), ("leave", "exit status 7")]
)
def test_a_process_that_dies_at_the_start_is_an_error_of_the_start(
    make_rig: Callable[..., Rig], trouble: str, reason: str
) -> None:
    rig = make_rig(on_open=trouble)
    with pytest.raises(TierUnavailableError) as told:
        rig.client.open()
    assert str(told.value) == f"held open: the tier's process died: {reason}"


def test_a_process_that_does_not_come_back_is_tried_again_later_and_later(
    make_rig: Callable[..., Rig], clock: HeldBackClock, tmp_path: Path
) -> None:
    rig = make_rig(on_open="refuse_again")
    rig.client.open()
    os.kill(pid_of(rig.runner), signal.SIGKILL)
    for _ in range(3):
        assert clock.paused.wait(30)
        clock.go_on()
    assert clock.paused.wait(30)
    assert clock.pauses_s == [1.0, 2.0, 4.0, 8.0]
    rig.wait_for(0, others=1)
    assert not rig.client.takes_reads
    # The end does not wait for the pause.
    rig.client.close(5.0)


def test_a_process_that_hangs_when_it_is_restarted_is_given_up(
    make_rig: Callable[..., Rig],
    clock: HeldBackClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig(on_open="hang_again")
    rig.client.open()
    monkeypatch.setattr(supervisor, "_REOPEN_S", 0.01)
    monkeypatch.setattr(rig.runner._supervisor, "_opening_s", 0.0)  # type: ignore[attr-defined]
    os.kill(pid_of(rig.runner), signal.SIGKILL)
    for _ in range(2):
        assert clock.paused.wait(30)
        clock.go_on()
    assert clock.paused.wait(30)
    assert clock.pauses_s == [1.0, 2.0, 4.0]
    assert "could not be restarted: it did not open the tier within 0.01 s" in caplog.text
    assert children() == []


def test_pauses_double_and_begin_anew_after_a_long_life() -> None:
    pauses = RestartPauses()
    assert [pauses.after(0.0) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pauses.after(29.9) == 30.0
    assert pauses.after(30.0) == 1.0
    assert pauses.after(5.0) == 2.0


def test_a_stopped_process_costs_the_engine_no_wait_and_is_killed_at_the_end(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    rig.client.open()
    child = pid_of(rig.runner)
    os.kill(child, signal.SIGSTOP)
    # More than the socket holds, and than is kept for it.
    keys = [bytes(36)] * 20_000
    deadline_s = rig.clock.now_s() + 60
    jobs = [
        Job(n, Operation.LOOKUP, keys, (), NOBODY, deadline_s) for n in range(10**6, 10**6 + 40)
    ]
    for job in jobs:
        rig.submit([job])
        rig.take()
    rig.client.close(0.2)
    assert not is_there(child)
    verdicts = set(rig.take())
    assert verdicts <= {"cancelled", "unavailable"}


def test_restarts_are_counted(clock: HeldBackClock) -> None:
    with live(["memory:?runner=process"], clock=clock) as engine:
        tier = engine.manager.stats[1]
        (child,) = children()
        assert tier.restarts == 0
        os.kill(child, signal.SIGKILL)
        assert clock.paused.wait(30)
        engine.rest()
        assert tier.restarts == 0, "it has only died"
        clock.go_on()
        for _ in range(3000):
            engine.step()
            if tier.restarts:
                break
        seen = {s.metric.name: s.value for s in metric_samples([tier])}
        assert seen["kvtier_process_restarts_total"] == 1
        assert children() not in ([], [child])


def children() -> list[int]:
    """The processes that tiers of this one have."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"process.child" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


# --- the process gets stuck -------------------------------------------------------------------


def late_job(rig: Rig, operation: Operation, *chunks: int) -> Job:
    """One whose deadline the process has still before it, and a clock that is ahead has not."""
    job = rig.job(operation, *chunks)
    job.deadline_s = time.monotonic() + 600
    return job


def test_a_process_that_is_stuck_is_killed_and_restarted(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    clock = LookClock()
    rig = make_rig(on_load="block", clock=clock)
    rig.client.open()
    child = pid_of(rig.runner)
    rig.submit([late_job(rig, Operation.LOAD, 0), late_job(rig, Operation.STORE, 1)])
    rig.wait_past("blocking")
    assert rig.take() == []
    clock.ahead_s = 1000.0
    assert rig.take() == ["timeout"] * 2
    assert rig.client.jobs.unreleased == 2, "the tier may still touch their slots"
    for _ in range(9):
        clock.look()
    assert is_there(child)
    clock.look()
    rig.wait_for(2, others=1)
    assert not is_there(child)
    assert rig.client.jobs.unreleased == 0
    assert clock.paused.wait(30)
    assert "the tier's process died: it was stuck, and was killed" in caplog.text
    clock.go_on()
    rig.wait_for(2, others=2)
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]


def test_a_process_that_answers_a_ping_is_not_stuck(make_rig: Callable[..., Rig]) -> None:
    clock = LookClock()
    rig = make_rig(on_load="hang", clock=clock)
    rig.client.open()
    child = pid_of(rig.runner)
    rig.submit([late_job(rig, Operation.LOAD, 0)])
    clock.ahead_s = 1000.0
    assert rig.take() == ["timeout"]
    clock.ahead_s = 0.0
    for _ in range(30):
        rig.do(Operation.LOOKUP, 0)
    clock.look()
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]
    assert clock.looks == 0, "nothing pings it any longer"
    assert pid_of(rig.runner) == child


def test_a_process_with_calls_that_never_end_is_killed_and_restarted(
    make_rig: Callable[..., Rig], clock: HeldBackClock, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"concurrency": 2, "breaker_failures": 2, "probe_interval": "10ms"}
    rig = make_rig(on_open="lose_patience", on_load="cling", runner=options)
    rig.client.open()
    child = pid_of(rig.runner)
    jobs = [rig.job(Operation.LOAD, chunk) for chunk in range(2)]
    for job in jobs:
        job.deadline_s = rig.clock.now_s() + 0.05
    rig.submit(jobs)
    assert rig.wait_for(2) == ["timeout"] * 2
    assert rig.client.jobs.unreleased == 2
    assert clock.paused.wait(30)
    assert not is_there(child)
    rig.take()
    assert rig.client.jobs.unreleased == 0, "their slots are free"
    told = [record.getMessage() for record in caplog.records]
    assert told[-2:] == [
        "held: reads stay refused: calls that hang leave no room for another, and nothing but the "
        "end of the process ends them",
        "held: the tier's process died: calls hung, and it was killed",
    ]
    clock.go_on()
    while not any(isinstance(report, ProcessRestarted) for report in rig.others):
        rig.wait_for(2, others=len(rig.others) + 1)
    rig.take()
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]


# --- the engine's thread ----------------------------------------------------------------------


def test_no_thread_of_the_engines_is_woken_up_for_a_job(tmp_path: Path) -> None:
    rig = Rig("process", tmp_path, clock=LookClock(), notifies=False)
    rig.client.open()
    try:
        (thread,) = (t for t in threading.enumerate() if t.name == "kvtier-held")
        status = Path(f"/proc/self/task/{thread.native_id}/status")
        settled(status)
        before = switches(status)
        for chunk in range(8):
            rig.submit([rig.job(Operation.STORE, chunk)])
            while len(rig.take()) <= chunk:
                threading.Event().wait(0.001)
        assert rig.take() == ["ok"] * 8
        assert switches(status) == before
    finally:
        rig.close()


def test_the_engine_goes_first_where_processors_are_short(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.client.open()
    of_process = os.getpriority(os.PRIO_PROCESS, pid_of(rig.runner))
    assert of_process == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def switches(status: Path) -> int:
    """How often a thread went to sleep of its own accord."""
    (line,) = (s for s in status.read_text().split("\n") if s.startswith("voluntary_ctxt"))
    return int(line.split()[1])


def settled(status: Path) -> None:
    """Wait until a thread has nothing left to do."""
    idle, before = 0, -1
    while idle < 20:
        now = switches(status)
        idle, before = (idle + 1, now) if now == before else (0, now)
        threading.Event().wait(0.005)


# --- the engine dies --------------------------------------------------------------------------

_ENGINE = """
    import os, sys, threading, pathlib
    from support.runners import Rig
    rig = Rig("process", pathlib.Path(sys.argv[1]), on_lookup=sys.argv[2])
    rig.client.open()
    rig.submit(rig.lookups(1))
    if sys.argv[2] == "block":
        rig.wait_past("blocking")
    if sys.argv[3] == "forked" and os.fork() == 0:
        threading.Event().wait(60)
    print(rig.runner.pid, flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(("trouble", "copy"), [("", ""), ("", "forked"), ("block", "")])
def test_the_process_ends_with_the_engine(tmp_path: Path, trouble: str, copy: str) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_ENGINE), str(tmp_path), trouble, copy],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        process_group=0,
    )
    with engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        assert is_there(child)
        os.kill(engine.pid, signal.SIGKILL)
        for _ in range(3000):
            if not is_there(child):
                break
            threading.Event().wait(0.01)
        gone = not is_there(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    assert gone
    if not trouble:
        assert (tmp_path / "diary").read_text().split() == ["open", "opened", "closed"]


@pytest.mark.parametrize("missing", ["a thread", "arguments"])
def test_a_process_that_cannot_be_started_is_an_error_of_the_start(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Whatever it fails with, and however far it has come."""
    start_thread = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvtier-held-wait":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    if missing == "a thread":
        monkeypatch.setattr(threading.Thread, "start", refuse)
        reason = "can't start new thread"
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, "/nul\0"])
        reason = "embedded null byte"
    rig = make_rig()
    with pytest.raises(TierUnavailableError) as told:
        rig.client.open()
    assert str(told.value) == f"held open: its process cannot be started: {reason}"
    assert children() == []


_BARE_ENGINE = """
    import pathlib, sys
    from support.runners import Operation, Rig
    _, directory, kind, on_open = sys.argv
    rig = Rig(kind, pathlib.Path(directory), on_open=on_open)
    note = f"{rig.pool.fd}"
    try:
        rig.client.open()
        note += " " + " ".join(rig.do(Operation.STORE, 0))
    except Exception as error:
        note += f" {error}"
    rig.close()
    pathlib.Path(directory, "note").write_text(note)
"""


def run_bare_engine(
    directory: Path, closed: str, kind: str, on_open: str
) -> subprocess.CompletedProcess[str]:
    engine = [sys.executable, "-c", textwrap.dedent(_BARE_ENGINE), str(directory), kind, on_open]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *engine],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        timeout=60,
    )


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize(("on_open", "said"), [("", "ok"), ("refuse", "connection refused")])
@pytest.mark.parametrize(
    ("closed", "lowest"), [("<&-", 0), (">&-", 1), ("2>&-", 2), ("<&- >&- 2>&-", 0)]
)
def test_an_engine_without_standard_streams(
    tmp_path: Path, kind: str, on_open: str, said: str, closed: str, lowest: int
) -> None:
    """The pool and the socket get their numbers, which in the process are the streams' again."""
    done = run_bare_engine(tmp_path, closed, kind, on_open)
    assert (done.returncode, done.stderr) == (0, "")
    note = (tmp_path / "note").read_text()
    assert note.startswith(f"{lowest} ")
    assert note.endswith(said)


def test_what_a_library_prints_goes_nowhere_where_there_are_no_streams(tmp_path: Path) -> None:
    """And into no socket: nothing else in the process has their numbers."""
    run_bare_engine(tmp_path, ">&- 2>&-", "process", "print_raw")
    assert (tmp_path / "note").read_text().endswith("ok")
    assert (tmp_path / "diary").read_text().count("/dev/null") == 2


# --- what it sends ----------------------------------------------------------------------------


def test_a_line_that_cannot_be_logged_costs_nothing_else(make_rig: Callable[..., Rig]) -> None:
    """As in the engine's process, where logging says so on standard error."""
    rig = make_rig(on_lookup="log_badly")
    rig.client.open()
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]


def test_a_result_that_does_not_fit_its_job_is_a_failure(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_load="hang")
    rig.client.open()
    job = rig.job(Operation.LOAD, 0, 1)
    rig.submit([job])
    # The process has heard of two chunks.
    job.keys = [*job.keys, KEYS[2]]
    rig.client.drain(0.01)
    assert rig.wait_for(1) == ["failed"]
    assert len(rig.results[0].verdicts) == 3
    assert "a result that does not fit its job" in caplog.text


# --- starting ---------------------------------------------------------------------------------


def test_secrets_are_neither_in_the_command_line_nor_in_the_environment(
    make_rig: Callable[..., Rig],
) -> None:
    secret = "hunter2-and-more"
    rig = make_rig(secret_key=secret)
    rig.client.open()
    place = Path(f"/proc/{pid_of(rig.runner)}")
    for part in ("cmdline", "environ"):
        shown = (place / part).read_bytes()
        assert shown
        assert secret.encode() not in shown
    assert b"kvtier_sdk.runner.process.child" in (place / "cmdline").read_bytes()


def test_secrets_arrive(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(secret_key="hunter2", on_open="tell_secret")
    rig.client.open()
    assert "secret hunter2" in rig.past()


def test_a_backend_that_only_the_engine_has_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "fleeting.py"
    module.write_text(
        "from kvtier_sdk import MemoryTier\nclass FleetingTier(MemoryTier):\n    pass\n"
    )
    import fleeting  # type: ignore[import-not-found]

    module.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(BackendLoadError, match="'fleeting'.* use runner 'thread'"):
        start(fleeting.FleetingTier)


def start(tier_class: type[MemoryTier], config: MemoryTierConfig | None = None) -> None:
    """Start a tier in a process, and end it."""
    pool = HostPool.create(PoolLayout(1, 64))
    try:
        runner = make(pool, tier_class, config, "process")
        runner.start()
        runner.close(5.0)
    finally:
        pool.close()


def make(
    pool: HostPool,
    tier_class: type[MemoryTier],
    config: MemoryTierConfig | None = None,
    option: Any = "auto",
) -> TierRunner:
    spec = TierSpec(
        "mine", "memory", tier_class, config or MemoryTierConfig(), RunnerOptions(runner=option)
    )
    return make_runner(
        spec, pool, namespace=Namespace({}), clock=SystemClock(), notify=None, verify=True
    )


class RemoteTier(ScriptedTier):
    """A tier on another machine, as far as its runner knows."""

    locality = Locality.REMOTE


class DiskTier(ScriptedTier):
    """A tier on this machine that waits for a disk, likewise."""

    medium = Medium.STORAGE


class BytesConfig(ScriptedConfig):
    """Options that plain data cannot hold."""

    key: SecretBytes = SecretBytes(b"")


def test_auto_takes_a_process_for_all_but_memory_where_that_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class LocalClassTier(RemoteTier):
        pass

    shared, own = HostPool.create(PoolLayout(1, 64)), HostPool(1, 64)
    caplog.set_level(logging.WARNING)
    try:
        assert isinstance(make(shared, MemoryTier), ThreadRunner)
        assert not isinstance(make(shared, MemoryTier), ProcessRunner)
        for tier_class in (RemoteTier, DiskTier):
            script = ScriptedConfig()
            assert isinstance(make(shared, tier_class, script), ProcessRunner)
            assert not isinstance(make(shared, tier_class, script, "thread"), ProcessRunner)
        assert caplog.text == ""
        assert not isinstance(make(own, RemoteTier, ScriptedConfig()), ProcessRunner)
        assert "runs in a thread, which may slow the engine down: the host pool" in caplog.text
        assert not isinstance(make(shared, LocalClassTier, ScriptedConfig()), ProcessRunner)
        assert "cannot import" in caplog.text
    finally:
        shared.close()
        own.close()


def test_what_cannot_run_in_a_process_is_told_with_what_to_do() -> None:
    class LocalClassTier(MemoryTier):
        pass

    shared, own = HostPool.create(PoolLayout(1, 64)), HostPool(1, 64)
    beginning = "tier 'mine': option 'runner' is 'process', but "
    try:
        for pool, tier_class, config, message in (
            (own, MemoryTier, None, "the host pool is of one process: make it with open_pool"),
            (shared, LocalClassTier, None, "a process of its own cannot import"),
            (
                shared,
                ScriptedTier,
                BytesConfig(key=b"\xff"),
                "a process of its own gets the options",
            ),
        ):
            with pytest.raises(ConfigError) as told:
                make(pool, tier_class, config, "process")
            assert str(told.value).startswith(beginning + message)
            assert str(told.value).endswith("or use runner 'thread'")
    finally:
        shared.close()
        own.close()


def test_the_pool_is_shared_where_a_tier_wants_a_process() -> None:
    for option, shared in (("process", True), ("auto", False), ("thread", False)):
        options = {"slots": 2, "chunk_bytes": 64, "tiers": [f"memory:?runner={option}"]}
        with open_pool(TieringConfig.from_dict(options)) as pool:
            assert pool.is_shared is shared
