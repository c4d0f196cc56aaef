"""Runs a tier in a separate process; a supervisor thread restarts a process that dies."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from kvtier_sdk.aio.clock import Clock, wait_out, wait_within
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierError
from kvtier_sdk.events import Announce
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.runner.breaker import Backoff
from kvtier_sdk.runner.jobs import (
    Job,
    JobResult,
    OpeningEnded,
    ProcessStarted,
    Report,
    RunnerStopped,
    Verdict,
    uniform_result,
)
from kvtier_sdk.runner.loop_thread import FAILED_CLOSE_S, TierRunner
from kvtier_sdk.runner.opening import may_pass, not_in_time
from kvtier_sdk.runner.process.bootstrap import write_bootstrap
from kvtier_sdk.runner.process.child_process import ChildProcess, copy_fd
from kvtier_sdk.runner.process.messages import (
    Channel,
    Kind,
    MessageError,
    message,
    plain_message,
    read_reports,
    write_job,
)

#: Pauses before restarts double up to _MAX_PAUSE_S. A process that lived that long resets them.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
#: A process without an answer within ``open_deadline`` plus this time is killed as stuck.
_START_S = 30.0
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
_Change: TypeAlias = ProcessStarted | RunnerStopped | OpeningEnded


class ProcessRunner(TierRunner):
    """Runs a tier in a separate process, which maps the pool.

    The engine's own thread writes jobs to the process's socket in :meth:`submit`, and reads reports
    in :meth:`poll`. Another thread would compete with the engine for the interpreter lock. A mostly
    idle supervisor thread starts the process, and restarts it after a crash. If the engine wants
    notifications, this thread also watches the socket, and wakes up once for each burst of reports.
    """

    _grace_s = 10.0  # the kernel may need this long to end a killed process

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        pool: PoolMemory,
        clock: Clock,
        notify: Callable[[], None] | None = None,
        announce: Announce | None = None,
    ) -> None:
        super().__init__(spec, clock, notify)
        self._announce = announce
        self._data: Channel | None = None  # after the start, only the engine's thread sets it
        # The supervisor's own unpolled reports, each with the channel of its process.
        self._changes: deque[tuple[Channel | None, _Change]] = deque()
        self._unpolled: list[Report] = []  # :meth:`close` polled them; the next poll returns them
        self._reading = threading.Lock()
        # Becomes readable at the first report. ``poll`` re-arms it without waking the thread.
        self._arrival = select.epoll()
        self._is_armed = False
        self._namespace = namespace
        self._pool = pool
        self._child: ChildProcess | None = None  # only the supervisor thread sets it
        self._sent: Mapping[str, Any] = {}  # the live options that the process received last
        self._supervising: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        if self._closing or not self.is_running:
            return [uniform_result(job, Verdict.CANCELLED) for job in jobs]
        data = self._data
        if data is None or data.is_full:
            reason = "the tier has no process now"
            if data is not None:
                reason = "the tier's process does not read its jobs"
            return [self._refusal(job, Verdict.UNAVAILABLE, reason) for job in jobs]
        written = []
        refused = []
        for job in jobs:
            try:
                written.append(message(Kind.JOB, write_job(job)))
            except Exception:
                reason = "could not be handed to the tier's process"
                self._log.exception("a job %s", reason)
                refused.append(self._refusal(job, Verdict.FAILED, reason))
        if written:
            data.write(b"".join(written))
        return refused

    def poll(self) -> Sequence[Report]:
        if not self._is_here:
            return ()  # in a forked copy, the socket belongs to the parent
        with self._reading:
            reports, self._unpolled = self._unpolled, []
            if self._data is not None:
                self._data.flush()
                reports += self._take(self._data)
            while self._changes:
                data, change = self._changes.popleft()
                if data is not None and isinstance(change, RunnerStopped):
                    # Read the last reports. All have arrived, because the process has ended.
                    reports += self._take(data)
                    data.close()
                    self._data = None
                reports.append(change)
                if data is not None and isinstance(change, ProcessStarted):
                    self._connect(data)
                    reports += self._take(data)
            if not self._is_armed and self._data is not None and not self._data.at_end:
                self._is_armed = True
                self._arrival.modify(self._data, _ONCE)
        return reports

    def peek(self) -> Sequence[Report]:
        if not self._is_here:
            return ()
        with self._reading:
            reports: list[Report] = list(self._unpolled)
            if (data := self._data) is not None:
                known = len(data.unpolled)
                self._read(data)
                if self._notify is not None and len(data.unpolled) > known:
                    # Notify the engine, because the socket no longer signals these reports.
                    self._call_soon(self._readable)
                reports += data.unpolled
            return reports + [change for _, change in self._changes.copy()]

    def suspect(self) -> None:
        self._call_soon(self._suspect)

    def options_changed(self) -> None:
        self._call_soon(self._send_options)

    def log_end(self, topic: str, message: str) -> bool:
        if not self.is_running or self._data is None or self._data.is_full:
            return False
        self._data.write(plain_message(Kind.LOG, [topic, message]))
        return True

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        # Poll once more to close the dead process's channel, because the engine may not poll again.
        self._unpolled = list(self.poll())
        if self._data is None and self._closed.is_set():
            self._arrival.close()

    # --- on the engine's thread, or a thread that peeks -----------------------------------------

    def _await_opening(self) -> bool:
        return bool(self._wait_opened())

    def _connect(self, data: Channel) -> None:
        self._data = data
        self._is_armed = True
        self._arrival.register(data, _ONCE)

    def _take(self, data: Channel) -> Sequence[Report]:
        self._read(data)
        taken, data.unpolled = data.unpolled, []
        return taken

    def _read(self, data: Channel) -> None:
        if data.at_end:
            return
        error = None
        try:
            for _, body in data.read():
                data.unpolled += read_reports(body)
        except MessageError as caught:
            error = caught
            data.at_end = True
        if data.at_end:
            self._call_soon(self._lost, data, error)

    def _refusal(self, job: Job, verdict: Verdict, reason: str) -> JobResult:
        error = f"{self._spec.name} {job.operation.value}: {reason}"
        return uniform_result(job, verdict, error=error)

    # --- on the supervisor's thread -------------------------------------------------------------

    async def _open(self) -> bool:
        options = self._spec.runner
        if self._notify is not None:
            asyncio.get_running_loop().add_reader(self._arrival, self._readable)
        starting = self._clock.spawn(self._start(), name=f"start {self._spec.name}")
        within_s = options.open_deadline_s if self._spec.engine_waits else 0
        try:
            in_time = await wait_within(self._clock, within_s, [starting])
            if not in_time and options.required:
                raise not_in_time(self._spec.name, options.open_deadline_s)
        except BaseException:
            await self._break_off(starting)
            raise
        if in_time:
            try:
                self._child = starting.result()
                self._connect(self._child.data)
                self._send_options()
            except TierError as error:
                if options.required or not may_pass(error):
                    raise
                self._note_failure(error)
        supervising = self._supervise(None if in_time else starting)
        self._supervising = self._clock.spawn(supervising, name=f"supervise {self._spec.name}")
        return self._child is not None and self._child.is_open

    async def _drain(self, timeout_s: float) -> bool:
        return self._child is None or await self._child.drain(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        self._ending = True
        if self._supervising is None:
            return
        if self._child is not None:
            await self._child.end(timeout_s)
        else:
            self._supervising.cancel()
        await asyncio.wait([self._supervising])

    def _ended(self) -> None:
        if self._child is not None:
            self._child.kill_and_wait()
            self._report_death(self._child, "its supervisor has ended")
            self._child = None

    async def _start(self) -> ChildProcess:
        spec = self._spec
        deadline_s = spec.runner.open_deadline_s
        pool_fd = copy_fd(self._pool.fd)
        try:
            self._sent = self._live_options()
            bootstrap = write_bootstrap(spec, self._namespace, self._pool.layout, pool_fd)
            child = ChildProcess(
                spec.name, self._clock, self._log, secrets_of(spec.config), self._announce
            )
            try:
                async with self._clock.timeout(deadline_s + _START_S) as limit:
                    await child.start(bootstrap, pool_fd)
            except BaseException as error:
                await child.end(FAILED_CLOSE_S)
                child.data.close()
                if isinstance(error, TimeoutError) and limit.expired():
                    raise not_in_time(spec.name, deadline_s) from None
                raise
        finally:
            os.close(pool_fd)
        return child

    async def _break_off(self, starting: asyncio.Task[ChildProcess]) -> None:
        starting.cancel()
        await wait_out([starting])
        if not starting.cancelled() and starting.exception() is None:
            # End the child, because its start succeeded before the cancellation reached it.
            child = starting.result()
            await child.end(FAILED_CLOSE_S)
            child.data.close()

    async def _supervise(self, starting: asyncio.Task[ChildProcess] | None) -> None:
        """Restart the process each time it ends, until the tier is closed."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        if starting is not None:
            try:
                await self._started(starting, is_restart=False)
            except asyncio.CancelledError:
                await self._break_off(starting)
                raise
            if self._child is not None:
                self._log.info("the tier's process was started")
        if self._child is None:
            await self._restart(backoff, is_restart=False)
            # Log a warning, because the preceding failures were warnings too.
            self._log.warning("the tier's process was started")
        while self._child is not None:
            reason = f"the tier's process died: {await self._child.ended}"
            child, self._child = self._child, None
            died_s = self._clock.now_s()
            if not self._ending:
                self._log.warning("%s", reason)
            self._report_death(child, reason)
            child.let_go()
            if self._ending:
                return
            if died_s - child.started_s >= _MAX_PAUSE_S:
                backoff.reset()
            await self._restart(backoff, is_restart=True)
            away = format_seconds(self._clock.now_s() - died_s)
            self._log.warning("the tier's process was restarted, %s after the last one died", away)

    async def _restart(self, backoff: Backoff, *, is_restart: bool) -> None:
        while self._child is None:
            pause_s = backoff.next_s()
            self._log.info("the tier's process is restarted in %g s", pause_s)
            await self._clock.sleep(pause_s)
            await self._started(self._start(), is_restart=is_restart)

    async def _started(self, starting: Awaitable[ChildProcess], *, is_restart: bool) -> None:
        try:
            self._child = await starting
        except Exception as error:
            self._note_failure(error)
        else:
            self._report(ProcessStarted(self._child.is_open, is_restart), self._child.data)
            # Send the options again, because they may have changed since the process got them.
            self._send_options()

    def _note_failure(self, error: Exception) -> None:
        self._log.warning("the tier's process could not be started: %s", error)
        self._report(OpeningEnded(str(error)), None)

    def _report_death(self, child: ChildProcess, reason: str) -> None:
        stopped = RunnerStopped(Verdict.UNAVAILABLE, io_ended=True, reason=reason)
        if self._closing:
            stopped = RunnerStopped(Verdict.CANCELLED, io_ended=True)
        self._report(stopped, child.data)

    def _report(self, change: _Change, data: Channel | None) -> None:
        self._changes.append((data, change))
        self._notify_engine()

    def _send_options(self) -> None:
        if self._child is not None and (options := self._live_options()) != self._sent:
            self._sent = options
            self._child.change(options)

    def _live_options(self) -> Mapping[str, Any]:
        return {option: now for option, (_, now) in self._spec.live_values().items()}

    def _suspect(self) -> None:
        if self._child is not None:
            self._child.suspect()

    def _lost(self, data: Channel, error: MessageError | None) -> None:
        child = self._child
        if child is not None and child.data is data:
            child.lost(error)

    def _readable(self) -> None:
        """Notify the engine once for all reports that arrive before its next poll."""
        if self._arrival.poll(0):
            self._is_armed = False
        self._notify_engine()
