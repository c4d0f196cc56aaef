"""A record of each tier's jobs, kept independently of the manager."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from kvtier_sdk.aio.clock import Clock, wait_out
from kvtier_sdk.runner import TierLoop
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    OpeningEnded,
    Operation,
    Report,
    Verdict,
)
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.types import OffloadKey
from support.inline_runner import InlineRunner
from support.simulation.breach import short

#: Tolerance when two times of the virtual clock are compared.
ROUNDING_S = 1e-6
#: Fraction of the polls that also return a second result of a job that has ended.
_LATE_RATE = 0.02


class Transfer(NamedTuple):
    """One chunk of a load or store, in a pinned slot; ``moves`` is true until the chunk arrives."""

    operation: Operation
    key: OffloadKey
    slot: int
    moves: bool


class Ledger:
    """A record of one tier's jobs.

    A job is *running* until its result, and then *lingering* until its I/O has ended. A job is
    *pending* until the manager reads the result, and *held* until the manager reads the I/O's end.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        holds: Callable[[int, OffloadKey], bool],
        on_breach: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.pending: dict[int, Job] = {}  # jobs whose result the manager has not read
        # Jobs whose I/O has not ended as far as the manager knows; their slots are pinned.
        self.held: dict[int, Job] = {}
        # How often lookups since the last reset have found each chunk.
        self.found: Counter[OffloadKey] = Counter()
        # Chunks stored or loaded since the tiers were last reset, unless a later load has failed.
        self.known: set[OffloadKey] = set()
        # Chunks whose store has ended, successfully or not.
        self.settled: set[OffloadKey] = set()
        self.arrived: set[OffloadKey] = set()  # chunks whose store has succeeded
        # Chunks to announce as stored, in order. A chunk that the tier removes before the manager
        # learns of its store is not announced.
        self.stored: list[OffloadKey] = []
        self.removed: list[OffloadKey] = []
        self.withheld: Collection[OffloadKey] = ()  # chunks that no tier may get
        self.given = 0  # chunks handed to the tier to store
        # Directions whose breaker is not closed, as far as the manager knows.
        self.refuses: set[Direction] = set()
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._holds = holds
        self._on_breach = on_breach
        self._running: dict[int, Job] = {}
        self._lingering: dict[int, Job] = {}
        # Jobs that were pending at a reset; their lookup hits and load failures do not count.
        self._outdated: set[int] = set()
        # For each chunk, the number of loads that have failed since the last reset.
        self._failed: Counter[OffloadKey] = Counter()
        # Loads of known chunks, started without a lookup in the tier.
        self._unasked: set[tuple[int, OffloadKey]] = set()
        self._results: dict[int, JobResult] = {}
        self._left: set[OffloadKey] = set()  # removed chunks that are not known again yet
        # Each pair of a job and a chunk that was removed while the job was pending.
        self._left_meanwhile: set[tuple[int, OffloadKey]] = set()
        self._put_by_job: set[tuple[int, OffloadKey]] = set()
        # Each reset that also clears the tiers begins a new era. The dictionaries have the era in
        # which each job was submitted, and the era of each chunk's last store.
        self._era = 0
        self._job_eras: dict[int, int] = {}
        self._put_eras: dict[OffloadKey, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running or self._lingering)

    @property
    def running(self) -> int:
        return len(self._running)

    # --- events -------------------------------------------------------------------------------

    def submitted(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            what = f"{self.name} got {job.operation.value} {job.job_id}"
            self.counts[f"{job.operation.value} jobs"] += 1
            if not job.keys:
                self._on_breach("no empty job", f"{what} of no key")
            if job.job_id in self.held:
                self._on_breach("a job's id is its own", f"{what} twice")
            self._job_eras[job.job_id] = self._era
            if job.operation is Operation.LOAD:
                self._check_answers(job, what)
            elif job.operation is Operation.STORE:
                self.given += len(job.keys)
                for key in job.keys:
                    if key in self.withheld:
                        self._on_breach(
                            "no tier gets what an ended request stored", f"{what} of {short(key)}"
                        )
            self._running[job.job_id] = self.pending[job.job_id] = self.held[job.job_id] = job

    def reported(self, report: Report) -> None:
        if isinstance(report, JobResult):
            self._concluded(report)
        elif isinstance(report, IoEnded):
            if self._lingering.pop(report.job_id, None) is None:
                self._on_breach("a job is released once", f"{self.name}: job {report.job_id}")
        elif isinstance(report, BreakerMoved) and report.state is BreakerState.OPEN:
            self.counts[f"{report.direction.value} breaker opened"] += 1

    def taken(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if isinstance(report, JobResult):
                job = self.pending.pop(report.job_id, None)
                if job is not None:
                    self._take_result(job, report)
                if report.released:
                    self._take_end(report.job_id)
            elif isinstance(report, IoEnded):
                self._take_end(report.job_id)
            elif isinstance(report, ChunksRemoved):
                self.removed.extend(report.keys)
                self._left.update(report.keys)
                self._note_departures(set(report.keys))
            elif isinstance(report, BreakerMoved):
                if report.state is BreakerState.CLOSED:
                    self.refuses.discard(report.direction)
                else:
                    self.refuses.add(report.direction)
            elif isinstance(report, OpeningEnded) and report.error is None:
                self.refuses.clear()

    def put(self, key: OffloadKey) -> None:
        for job in self._under_way():
            if job.operation is Operation.STORE and key in job.keys:
                self._put_by_job.add((job.job_id, key))
                self._put_eras[key] = max(self._put_eras.get(key, 0), self._job_eras[job.job_id])

    def reset(self, *, tiers_too: bool) -> None:
        self._era += tiers_too
        if tiers_too:
            self.known.clear()
        self.found.clear()
        self._failed.clear()
        self._outdated.update(self.pending)

    # --- queries ------------------------------------------------------------------------------

    def check_deadlines(self) -> None:
        """Check that all due jobs have a result; the runner must have just run."""
        now_s = self._clock.now_s() - ROUNDING_S
        for job in self._running.values():
            if job.deadline_s < now_s:
                self._on_breach(
                    "a job ends by its deadline",
                    f"{self.name}: {job.operation.value} {job.job_id} was due {job.deadline_s:g}",
                )

    def may_touch(self, operation: Operation, slot: int | None, key: OffloadKey) -> bool:
        """Return true if a job moves ``key`` in ``slot``. ``None`` means any slot."""
        for job in self._under_way():
            if job.operation is operation:
                for index, (name, place) in enumerate(zip(job.keys, job.slots, strict=True)):
                    if name == key and slot in (None, place) and not self._is_done(job, index):
                        return True
        return False

    def transfers(self) -> Iterator[Transfer]:
        for job in self.held.values():
            known = job.job_id not in self.pending
            for index, slot in enumerate(job.slots):
                moves = not (known and self._is_done(job, index))
                yield Transfer(job.operation, job.keys[index], slot, moves)

    def describe(self) -> str:
        return f"{self.name}: " + ", ".join(
            f"{job.operation.value} {job.job_id} of {' '.join(map(short, job.keys))}"
            for job in self.held.values()
        )

    def _is_done(self, job: Job, index: int) -> bool:
        """Return true if a chunk has arrived, even if the job still moves other chunks."""
        result = self._results.get(job.job_id)
        return result is not None and result.verdicts[index] is Verdict.OK

    def _take_end(self, job_id: int) -> None:
        self.held.pop(job_id, None)
        self._results.pop(job_id, None)

    def _note_departures(self, keys: set[OffloadKey]) -> None:
        for job in self.pending.values():
            self._left_meanwhile.update((job.job_id, key) for key in keys.intersection(job.keys))

    def _under_way(self) -> Iterator[Job]:
        return itertools.chain(self._running.values(), self._lingering.values())

    def _check_answers(self, load: Job, what: str) -> None:
        for key in load.keys:
            is_known = key in self.known and key not in self._left
            if is_known and self._failed[key] >= self.found[key]:
                self._unasked.add((load.job_id, key))
                self.counts["chunks loaded without a lookup"] += 1
                continue
            if not self.found[key]:
                self._on_breach(
                    "a load rests on an answer",
                    f"{what} of {short(key)}, which it has not said it has since the last reset",
                )
            if self._failed[key] >= self.found[key]:
                self._on_breach(
                    "a load that failed is not tried again on the same answer",
                    f"{what} of {short(key)}, which failed {self._failed[key]} times already",
                )

    def _concluded(self, result: JobResult) -> None:
        job = self._running.pop(result.job_id, None)
        if job is None:
            self._on_breach(
                "a job ends in one result", f"{self.name}: job {result.job_id} ends again"
            )
            return
        if len(result.verdicts) != len(job.keys):
            self._on_breach(
                "a job ends in one result", f"{self.name}: job {result.job_id} lacks verdicts"
            )
        self._results[job.job_id] = result
        if not result.released:
            self._lingering[job.job_id] = job
        for index, (key, verdict) in enumerate(zip(job.keys, result.verdicts, strict=False)):
            self.counts[f"{job.operation.value} {verdict.value}"] += 1
            if verdict is Verdict.OK:
                self._check_success(job, index, key)

    def _check_success(self, job: Job, index: int, key: OffloadKey) -> None:
        if job.operation is Operation.LOAD and not self._holds(job.slots[index], key):
            self._on_breach(
                "what is reported as loaded is there",
                f"{self.name}: {short(key)} is not in slot {job.slots[index]}",
            )
        asked_now = job.operation is Operation.LOOKUP and self._job_eras[job.job_id] == self._era
        if asked_now and self._put_eras.get(key) != self._era:
            self._on_breach(
                "a reset of the tiers too is cold",
                f"{self.name} has {short(key)}, which was stored before it",
            )
        if job.operation is Operation.STORE and (job.job_id, key) not in self._put_by_job:
            self._on_breach(
                "what is reported as stored is there",
                f"{self.name} was not given {short(key)} by job {job.job_id}",
            )

    def _take_result(self, job: Job, result: JobResult) -> None:
        if job.operation is Operation.STORE:
            self.settled.update(job.keys)
        outdated = job.job_id in self._outdated
        self._outdated.discard(job.job_id)
        for key, verdict in zip(job.keys, result.verdicts, strict=False):
            if verdict is Verdict.OK:
                if job.operation is Operation.LOOKUP and not outdated:
                    self.found[key] += 1
                elif job.operation is Operation.LOAD:
                    self._know(job, key)
                elif job.operation is Operation.STORE:
                    self._know(job, key)
                    self.arrived.add(key)
                    if (job.job_id, key) not in self._left_meanwhile:
                        self.stored.append(key)
            elif job.operation is Operation.LOAD:
                self.known.discard(key)
                if (job.job_id, key) not in self._unasked and not outdated:
                    self._failed[key] += 1

    def _know(self, job: Job, key: OffloadKey) -> None:
        if self._job_eras[job.job_id] == self._era:
            self.known.add(key)
            if (job.job_id, key) not in self._left_meanwhile:
                self._left.discard(key)


class WatchedRunner(InlineRunner):
    def __init__(
        self,
        make_loop: Callable[[Callable[[Report], None]], TierLoop],
        clock: Clock,
        ledger: Ledger,
        note: Callable[..., None],
        let_go: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._let_go = let_go
        self._rng = rng
        self._over: deque[JobResult] = deque(maxlen=8)
        self._ledger = ledger
        self._note = note

        def make_watched_loop(report: Callable[[Report], None]) -> TierLoop:
            def watched(said: Report) -> None:
                ledger.reported(said)
                report(said)

            return make_loop(watched)

        super().__init__(make_watched_loop, clock)

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        for job in jobs:
            self._note(self._ledger.name, job.operation.value, job.job_id, job.keys, job.slots)
        self._ledger.submitted(jobs)
        return super().submit(jobs)

    def start(self) -> bool:
        is_open = super().start()
        if not is_open:
            self._ledger.refuses.update(Direction)
        return is_open

    def poll(self) -> Sequence[Report]:
        reports = super().poll()
        self._ledger.taken(reports)
        return [*reports, *self._late(reports)]

    def _late(self, reports: Sequence[Report]) -> list[Report]:
        """Record a poll's reports in the journal; sometimes add an ended job's second result."""
        late: list[Report] = []
        if self._over and self._rng.random() < _LATE_RATE:
            over = self._rng.choice(self._over)
            late.append(JobResult(over.job_id, [Verdict.OK] * len(over.verdicts)))
            self._ledger.counts["results of jobs that were over"] += 1
        for report in reports:
            if isinstance(report, JobResult):
                verdicts = [verdict.value for verdict in report.verdicts]
                open_io = "" if report.released else "its I/O goes on"
                self._note(self._ledger.name, "job", report.job_id, "is", verdicts, open_io)
                if report.released:
                    self._over.append(report)
            elif isinstance(report, IoEnded):
                self._note(self._ledger.name, "I/O of job", report.job_id, "has ended")
            elif isinstance(report, ChunksRemoved):
                self._note(self._ledger.name, "removed", report.keys)
            elif isinstance(report, BreakerMoved):
                words = report.direction.value, "breaker", report.state.value
                self._note(self._ledger.name, *words)
        return late

    def close(self, timeout_s: float) -> None:
        self.drain(timeout_s)
        self._event_loop.run_until_complete(self._tier_loop.close())
        self.discard()

    def discard(self) -> None:
        """End hung calls, because they still use their buffers; then close the loop."""
        if self._event_loop.is_closed():
            return
        self._let_go()
        # Run the loop once, because a job gets its task only when it begins.
        self.run_for(0)
        while tasks := asyncio.all_tasks(self._event_loop):
            for task in tasks:
                task.cancel()
            self._event_loop.run_until_complete(wait_out(list(tasks)))
        end_event_loop(self._event_loop, self._clock)
