"""Keeps a process of a tier running: starts it, and starts another one when it dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from kvtier_sdk.aio.clock import Clock, wait_out
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.runner.backoff import Backoff
from kvtier_sdk.runner.base import PoolMemory
from kvtier_sdk.runner.jobs import OpeningEnded, ProcessStarted, RunnerStopped, Verdict
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.opening import may_pass, not_in_time
from kvtier_sdk.runner.process.bootstrap import write_bootstrap
from kvtier_sdk.runner.process.child_process import ChildProcess, copy_fd

#: The pause before a process is restarted doubles from the first up to the longest. A process that
#: lives at least as long as the longest pause resets it.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
#: How much longer than ``open_deadline`` a process may take to answer. A silent one is blocking its
#: loop, and is killed.
_START_S = 30.0
#: How long a cancelled opening may take to end.
_CANCEL_S = 5.0

Change: TypeAlias = ProcessStarted | RunnerStopped | OpeningEnded


class Supervisor:
    """Runs one process at a time, all on one event loop.

    Attributes:
        child: the process that accepts jobs, if there is one.
        first: the process that was ready when :meth:`open` returned, if there was one.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        pool: PoolMemory,
        clock: Clock,
        log: TierLog,
        report: Callable[[Change, ChildProcess | None], None],
        verify: bool,
    ) -> None:
        self.child: ChildProcess | None = None
        self.first: ChildProcess | None = None
        self._spec = spec
        self._namespace = namespace
        self._pool = pool
        self._clock = clock
        self._log = log
        self._report = report
        self._verify = verify
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> bool:
        """Start the process and open the tier in it; return true if it is open."""
        options = self._spec.runner
        starting: asyncio.Task[ChildProcess] | None
        starting = self._clock.spawn(self._start(), name=f"start {self._spec.name}")
        try:
            async with self._clock.timeout(
                options.open_deadline_s if self._spec.engine_waits else 0
            ):
                await asyncio.wait([starting])
        except TimeoutError:
            if options.required:
                await self._break_off(starting)
                raise not_in_time(self._spec.name, options.open_deadline_s) from None
        except asyncio.CancelledError:
            await self._break_off(starting)
            raise
        else:
            try:
                self.child = self.first = starting.result()
            except TierError as error:
                if options.required or not may_pass(error):
                    raise
                self._note_failure(error)
            starting = None
        supervising = self._supervise(starting)
        self._task = self._clock.spawn(supervising, name=f"supervise {self._spec.name}")
        return self.child is not None and self.child.is_open

    async def drain(self, timeout_s: float) -> bool:
        return self.child is None or await self.child.drain(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Close the tier and end its process; kill the process if it does not end in time."""
        self._closing = True
        if self._task is None:
            return
        if self.child is not None:
            await self.child.end(timeout_s)
        else:
            self._task.cancel()
        await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Kill the process and block until it is gone; for a loop that has stopped."""
        if self.child is not None:
            self.child.kill_and_wait()
            self._report_death(self.child, "its supervisor has ended")
            self.child = None
        self._closing = True

    async def _start(self) -> ChildProcess:
        """Start a process, and wait until it accepts jobs; it bounds the opening by itself."""
        pool_fd = copy_fd(self._pool.fd)
        try:
            return await self._start_with(pool_fd)
        finally:
            os.close(pool_fd)

    async def _start_with(self, pool_fd: int) -> ChildProcess:
        spec = self._spec
        bootstrap = write_bootstrap(
            spec,
            namespace=self._namespace,
            layout=self._pool.layout,
            pool_fd=pool_fd,
            verify=self._verify,
        )
        child = ChildProcess(spec.name, self._clock, self._log, secrets_of(spec.config))
        deadline_s = spec.runner.open_deadline_s
        try:
            async with self._clock.timeout(deadline_s + _START_S) as limit:
                await child.start(bootstrap, pool_fd)
        except BaseException as error:
            await child.end(_CANCEL_S)
            child.data.close()
            if isinstance(error, TimeoutError) and limit.expired():
                raise not_in_time(spec.name, deadline_s) from None
            raise
        return child

    async def _break_off(self, starting: asyncio.Task[ChildProcess]) -> None:
        """End a process that is being started."""
        starting.cancel()
        await wait_out([starting])
        if not starting.cancelled() and starting.exception() is None:
            # The start succeeded before the cancellation reached it.
            child = starting.result()
            await child.end(_CANCEL_S)
            child.data.close()

    async def _supervise(self, starting: asyncio.Task[ChildProcess] | None) -> None:
        """Start another process whenever one ends, until the tier is closed."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        if starting is not None:
            try:
                await self._started(starting, is_restart=False)
            except asyncio.CancelledError:
                await self._break_off(starting)
                raise
            if self.child is not None:
                self._log.info("the tier's process was started")
        if self.child is None:
            await self._restart(backoff, is_restart=False)
            # A warning, because the failures before it were warnings too.
            self._log.warning("the tier's process was started")
        while self.child is not None:
            reason = f"the tier's process died: {await self.child.ended}"
            child, self.child = self.child, None
            died_s = self._clock.now_s()
            if not self._closing:
                self._log.warning("%s", reason)
            self._report_death(child, reason)
            child.let_go()
            if self._closing:
                return
            if died_s - child.started_s >= _MAX_PAUSE_S:
                backoff.reset()
            await self._restart(backoff, is_restart=True)
            away = format_seconds(self._clock.now_s() - died_s)
            self._log.warning("the tier's process was restarted, %s after the last one died", away)

    async def _restart(self, backoff: Backoff, *, is_restart: bool) -> None:
        while self.child is None:
            pause_s = backoff.next_s()
            self._log.info("the tier's process is restarted in %g s", pause_s)
            await self._clock.sleep(pause_s)
            await self._started(self._start(), is_restart=is_restart)

    async def _started(self, starting: Awaitable[ChildProcess], *, is_restart: bool) -> None:
        try:
            self.child = await starting
        except Exception as error:
            self._note_failure(error)
        else:
            self._report(ProcessStarted(self.child.is_open, is_restart), self.child)

    def _note_failure(self, error: Exception) -> None:
        self._log.warning("the tier's process could not be started: %s", error)
        self._report(OpeningEnded(str(error)), None)

    def _report_death(self, child: ChildProcess, reason: str) -> None:
        stopped = RunnerStopped(Verdict.UNAVAILABLE, io_ended=True, reason=reason)
        if self._closing:
            stopped = RunnerStopped(Verdict.CANCELLED, io_ended=True)
        self._report(stopped, child)
