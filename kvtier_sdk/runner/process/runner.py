"""A tier's loop in a process of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.runner.base import PoolMemory
from kvtier_sdk.runner.jobs import (
    Job,
    JobResult,
    ProcessStarted,
    Report,
    RunnerStopped,
    Verdict,
    uniform_result,
)
from kvtier_sdk.runner.loop_thread import LoopRunner
from kvtier_sdk.runner.process.bootstrap import fault_of
from kvtier_sdk.runner.process.child_process import ChildProcess
from kvtier_sdk.runner.process.messages import (
    Channel,
    Kind,
    MessageError,
    message,
    plain_message,
    read_reports,
    write_job,
)
from kvtier_sdk.runner.process.supervisor import Change, Supervisor


class ProcessRunner(LoopRunner):
    """Runs a tier in a process of its own, which maps the pool; only keys and verdicts cross.

    The engine's own thread writes jobs into the process's socket and reads reports out of it,
    inside :meth:`submit` and :meth:`poll`: a separate thread for this would take the interpreter
    lock from the engine each time. A mostly idle supervisor thread starts the process and restarts
    it when it dies. For an engine that wants to be notified, that thread also watches the socket,
    and wakes up once for each burst of reports.
    """

    # The kernel may need this long to end a process that is killed.
    _grace_s = 10.0

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        pool: PoolMemory,
        clock: Clock,
        notify: Callable[[], None] | None = None,
        verify: bool = True,
    ) -> None:
        fault = fault_of_process(spec, pool)
        if fault is not None:
            reason = "option 'runner' is 'process'"
            if spec.tier_class.needs_process:
                reason = f"backend {spec.backend!r} has to run in a process of its own"
            raise ConfigError(f"tier {spec.name!r}: {reason}, but {fault}")
        super().__init__(spec, clock, notify)
        # The channel to the process, or ``None``. Only the engine's thread changes it.
        self._data: Channel | None = None
        # Changes that the engine's thread has not polled yet, each with its process's channel.
        self._changes: deque[tuple[Channel | None, Change]] = deque()
        # Reports that :meth:`peek` or :meth:`close` read before a poll.
        self._unpolled: list[Report] = []
        self._reading = threading.Lock()
        self._watched = False
        self._supervisor = Supervisor(
            spec,
            namespace=namespace,
            pool=pool,
            clock=clock,
            log=self._log,
            report=self._changed,
            verify=verify,
        )

    @property
    def pid(self) -> int | None:
        """Id of the tier's process, while there is one."""
        child = self._supervisor.child
        return None if child is None else child.pid

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Write jobs into the process's socket; return the results of refused ones."""
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
            return ()  # in a forked copy, the socket is the parent's
        with self._reading:
            reports, self._unpolled = self._unpolled, []
            if self._data is not None:
                self._data.flush()
                self._read(self._data, reports)
            while self._changes:
                data, change = self._changes.popleft()
                if data is not None and isinstance(change, RunnerStopped):
                    # The process is gone, so everything that it wrote has arrived.
                    self._read(data, reports)
                    data.close()
                    self._data = None
                reports.append(change)
                if data is not None and isinstance(change, ProcessStarted):
                    self._data = data
                    self._read(data, reports)
        if self._notify is not None and not self._watched:
            self._watch()
        return reports

    def peek(self) -> Sequence[Report]:
        if not self._is_here:
            return ()
        with self._reading:
            known = len(self._unpolled)
            if self._data is not None:
                self._read(self._data, self._unpolled)
            if len(self._unpolled) > known:
                # The socket no longer wakes the engine for reports that were read here, so notify
                # it.
                self._call_soon(self._readable)
            changes = [change for _, change in self._changes.copy()]
            return [*self._unpolled, *changes]

    def suspect(self) -> None:
        self._call_soon(self._suspect)

    def log_end(self, topic: str, message: str) -> bool:
        if not self.is_running or self._data is None or self._data.is_full:
            return False
        self._data.write(plain_message(Kind.LOG, [topic, message]))
        return True

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        # Poll once more to close the dead process's channel, because no other poll may follow.
        self._unpolled = list(self.poll())

    # --- on the engine's thread, or one that peeks ----------------------------------------------

    def _await_opening(self) -> bool:
        is_open = self._wait_opened()
        if self._supervisor.first is not None:
            self._data = self._supervisor.first.data
        self._watch()
        return bool(is_open)

    def _read(self, data: Channel, reports: list[Report]) -> None:
        if data.at_end:
            return
        error = None
        try:
            for _, body in data.read():
                reports += read_reports(body)
        except MessageError as caught:
            error = caught
            data.at_end = True
        if data.at_end:
            self._call_soon(self._lost, data, error)

    def _refusal(self, job: Job, verdict: Verdict, reason: str) -> JobResult:
        error = f"{self._spec.name} {job.operation.value}: {reason}"
        return uniform_result(job, verdict, error=error)

    def _watch(self) -> None:
        """Have the supervisor thread notify the engine when the process has written something."""
        if self._notify is not None and self._data is not None and not self._data.at_end:
            self._watched = True
            self._call_soon(self._add_reader, self._data)

    # --- on the supervisor's thread -------------------------------------------------------------

    async def _open(self) -> bool:
        return await self._supervisor.open()

    async def _drain(self, timeout_s: float) -> bool:
        return await self._supervisor.drain(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        await self._supervisor.close(timeout_s)

    def _ended(self) -> None:
        self._supervisor.abandon()

    def _changed(self, change: Change, child: ChildProcess | None) -> None:
        if child is not None and isinstance(change, RunnerStopped):
            self._remove_reader(child.data)
        self._changes.append((None if child is None else child.data, change))
        self._notify_engine()

    def _suspect(self) -> None:
        if self._supervisor.child is not None:
            self._supervisor.child.suspect()

    def _lost(self, data: Channel, error: MessageError | None) -> None:
        if (child := self._living(data)) is not None:
            child.lost(error)

    def _living(self, data: Channel) -> ChildProcess | None:
        """Return the process behind a channel, if it has not been replaced meanwhile."""
        child = self._supervisor.child
        return child if child is not None and child.data is data else None

    def _add_reader(self, data: Channel) -> None:
        if self._living(data) is None:
            self._watched = False
            return
        asyncio.get_running_loop().add_reader(data, self._readable)

    def _remove_reader(self, data: Channel) -> None:
        if self._event_loop is not None:
            self._event_loop.remove_reader(data)
        self._watched = False

    def _readable(self) -> None:
        """Notify the engine once; its next poll reads and has the socket watched again."""
        child = self._supervisor.child
        if child is not None:
            self._remove_reader(child.data)
        self._notify_engine()


def fault_of_process(spec: TierSpec, pool: PoolMemory) -> str | None:
    """Return why a tier cannot run in a process of its own, or ``None``."""
    fault = fault_of(spec)
    if not pool.is_shared:
        fault = (
            "the host pool is of one process: make it with open_pool, HostPool.create or "
            "HostPool.join"
        )
    if fault is None or spec.tier_class.needs_process:
        return fault
    return f"{fault}, or use runner 'thread'"
