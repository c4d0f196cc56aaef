"""A tier's loop in a process of its own, which is started anew when it dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.runner.base import PoolMemory
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    Job,
    JobResult,
    ProcessRestarted,
    Report,
    Verdict,
)
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.process.bootstrap import fault_of, write_bootstrap
from kvtier_sdk.runner.process.child_process import ChildProcess, copy_fd
from kvtier_sdk.runner.thread import ThreadRunner

#: The pause before a process is started anew; it doubles up to the longest.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
#: How long a process that is started anew may take to open the tier, where the first took less
#: than half of it; otherwise twice as long as the first.
_REOPEN_S = 60.0
#: How long an opening that is cancelled may take to end.
_CANCEL_S = 10.0
#: How long the kernel may take to end a process that is killed.
_KILL_S = 10.0


class RestartPauses:
    """How long to wait before a process is started anew. Pure state."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """The next pause.

        Args:
            lived_s: how long the tier was open in the last process; long enough, and the pauses
                begin anew.
        """
        if lived_s >= _MAX_PAUSE_S:
            self._next_s = _FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MAX_PAUSE_S)
        return pause_s


class ProcessLoop:
    """Stands in the engine for the tier loop that runs in a process.

    While there is no process, or it has not opened the tier, jobs are concluded as
    ``UNAVAILABLE`` and both breakers are reported open; with the next one they are closed.

    Attributes:
        patience_s: how long :meth:`close` waits before it kills.

    Args:
        spec: the tier.
        namespace: of its chunks.
        pool: the slots.
        clock: time and tasks.
        report: takes each report, on this loop or on the thread that collects it.
        attentive: whether reports are collected at once, or when somebody calls :meth:`collect`.
        verify: as for the tier loop.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        pool: PoolMemory,
        clock: Clock,
        report: Callable[[Report], None],
        attentive: bool,
        verify: bool = True,
    ) -> None:
        self.patience_s = 5.0
        self._attentive = attentive
        self._spec = spec
        self._namespace = namespace
        self._pool = pool
        self._clock = clock
        self._report = report
        self._verify = verify
        self._log = TierLog(spec.name, clock)
        self._child: ChildProcess | None = None
        self._opening_s = 0.0
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Of the process that has the tier, while there is one."""
        return None if self._child is None else self._child.pid

    async def open(self) -> None:
        """Start the process and open the tier in it.

        Raises:
            ConfigError: a setting cannot work.
            BackendError: the backend cannot be imported in the process.
            TierError: the store cannot be reached, or the process died.
        """
        began_s = self._clock.now_s()
        self._child = await self._start()
        self._opening_s = self._clock.now_s() - began_s
        self._keeper = self._clock.spawn(self._keep(), name=f"keep {self._spec.name}")

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs. On any thread."""
        child = self._child
        if child is not None and not self._closing:
            child.submit(jobs)
        else:
            self._refuse(jobs)

    def collect(self) -> None:
        """Report what the process has. On any thread; waits for nothing."""
        child = self._child
        if child is not None:
            child.collect()

    async def drain(self, timeout_s: float) -> bool:
        """As the tier loop's."""
        return self._child is None or await self._child.drain(timeout_s)

    async def close(self) -> None:
        """Close the tier and end its process; kill it where it does not end."""
        self._closing = True
        if self._keeper is None:
            return
        if self._child is not None:
            await self._child.end(self.patience_s)
        else:
            self._keeper.cancel()
        await asyncio.wait([self._keeper])

    def abandon(self) -> None:
        """Conclude every job as cancelled, and each that is handed over later."""
        self._closing = True
        if self._child is not None:
            self._child.kill_and_wait()
            self._child.give_up(Verdict.CANCELLED)
            self._child = None

    async def _start(self) -> ChildProcess:
        pool_fd = copy_fd(self._pool.fd)
        try:
            return await self._start_with(pool_fd)
        finally:
            os.close(pool_fd)

    async def _start_with(self, pool_fd: int) -> ChildProcess:
        child = ChildProcess(
            self._spec.name, self._clock, self._report, self._log, attentive=self._attentive
        )
        order = write_bootstrap(
            self._spec,
            namespace=self._namespace,
            layout=self._pool.layout,
            pool_fd=pool_fd,
            verify=self._verify,
        )
        try:
            await child.start(order, pool_fd)
        except BaseException:
            await child.end(_CANCEL_S)
            raise
        return child

    async def _keep(self) -> None:
        """Wait for the process's end, again and again, and start the next one."""
        pauses = RestartPauses()
        while self._child is not None:
            opened_s = self._clock.now_s()
            reason = f"the tier's process died: {await self._child.ended}"
            child, self._child = self._child, None
            if self._closing:
                child.give_up(Verdict.CANCELLED)
                return
            child.give_up(Verdict.UNAVAILABLE, reason)
            self._tell(BreakerState.OPEN)
            self._log.error("%s", reason)
            await self._start_anew(pauses, self._clock.now_s() - opened_s)

    async def _start_anew(self, pauses: RestartPauses, lived_s: float) -> None:
        limit_s = max(_REOPEN_S, 2 * self._opening_s)
        while self._child is None:
            pause_s = pauses.after(lived_s)
            self._log.info("the tier's process is started anew in %g s", pause_s)
            await self._clock.sleep(pause_s)
            try:
                # Who waits for the first opening can break it off; for this one nobody waits.
                async with self._clock.timeout(limit_s):
                    self._child = await self._start()
            except Exception as error:
                reason = str(error) or f"it did not open the tier within {limit_s:g} s"
                self._log.warning("the tier's process could not be started anew: %s", reason)
                lived_s = 0.0
        self._log.warning("the tier's process was started anew")
        self._report(ProcessRestarted())
        self._tell(BreakerState.CLOSED)

    def _tell(self, state: BreakerState) -> None:
        for direction in Direction:
            self._report(BreakerMoved(direction, state))

    def _refuse(self, jobs: Sequence[Job]) -> None:
        verdict = Verdict.CANCELLED if self._closing else Verdict.UNAVAILABLE
        for job in jobs:
            self._report(JobResult(job.job_id, [verdict] * len(job.keys)))


class ProcessRunner(ThreadRunner):
    """Runs a tier in a process of its own, which maps the pool; only keys and verdicts cross.

    Jobs go into the process's socket and reports come out of it on the engine's own thread, inside
    :meth:`submit` and :meth:`poll`: a thread that did it for the engine would take the interpreter
    lock from it each time. A thread there is, which sleeps: it starts the process, looks after it,
    and starts it anew when it dies. Who wants to be notified has that thread read, and wakes it up
    for each report.

    Args:
        spec: the tier.
        namespace: of its chunks.
        pool: the slots; shared, and not closed before the runner.
        clock: time and tasks in the engine; its ``now_s`` must be the machine's, which the
            process has too.
        notify: as for :class:`ThreadRunner`.
        verify: as for the tier loop.

    Raises:
        ConfigError: the pool is of one process, or the tier cannot be built in another one.
    """

    _parting_s = _KILL_S

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
            raise ConfigError(f"tier {spec.name!r}: option 'runner' is 'process', but {fault}")

        def make_loop(report: Callable[[Report], None]) -> ProcessLoop:
            self._process_loop = ProcessLoop(
                spec,
                namespace=namespace,
                pool=pool,
                clock=clock,
                report=report,
                attentive=notify is not None,
                verify=verify,
            )
            return self._process_loop

        super().__init__(spec.name, make_loop, clock, notify)

    @property
    def pid(self) -> int | None:
        """Of the process that has the tier, while there is one."""
        return self._process_loop.pid

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._over:
            super().submit(jobs)
        else:
            self._process_loop.submit(jobs)

    def poll(self) -> Sequence[Report]:
        self._process_loop.collect()
        return super().poll()

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end the process. A second call does nothing.

        Args:
            timeout_s: for each of draining and closing; a process that takes longer is killed.
        """
        self._process_loop.patience_s = timeout_s
        super().close(timeout_s)


def fault_of_process(spec: TierSpec, pool: PoolMemory) -> str | None:
    """Why a tier cannot run in a process of its own, if so.

    Args:
        spec: the tier.
        pool: the slots.

    Returns:
        What is wrong and what to do, to follow "but"; or ``None``.
    """
    if not pool.is_shared:
        return (
            "the host pool is of one process: make it with open_pool, HostPool.create or "
            "HostPool.join, or use runner 'thread'"
        )
    fault = fault_of(spec)
    return None if fault is None else f"{fault}, or use runner 'thread'"
