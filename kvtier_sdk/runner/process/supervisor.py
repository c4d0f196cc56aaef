"""Keeps a process of a tier running: starts it, and starts another one when it dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.runner.base import PoolMemory
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.process.bootstrap import write_bootstrap
from kvtier_sdk.runner.process.child_process import ChildProcess, copy_fd

#: The pause before a process is restarted; it doubles up to the longest.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
#: How long a restarted process may take to open the tier, or twice as long as the first one took
#: if that is more.
_REOPEN_S = 60.0
#: How long an opening that is cancelled may take to end.
_CANCEL_S = 10.0


class RestartPauses:
    """The pauses before a process is restarted. Pure state."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """Return the next pause, in seconds.

        Args:
            lived_s: how long the tier was open in the last process; after a long life the pauses
                are short again.
        """
        if lived_s >= _MAX_PAUSE_S:
            self._next_s = _FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MAX_PAUSE_S)
        return pause_s


class Supervisor:
    """Has one process at a time. All of it runs on one event loop.

    Attributes:
        child: the process that has the tier open, if there is one.

    Args:
        spec: the tier.
        namespace: of its chunks.
        pool: the slots.
        clock: time and tasks.
        log: the tier's.
        on_restart: called with a process that has opened the tier in the place of another.
        on_death: called with a process that is gone, and what it died of.
        verify: as for the tier loop.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        namespace: Namespace,
        pool: PoolMemory,
        clock: Clock,
        log: TierLog,
        on_restart: Callable[[ChildProcess], None],
        on_death: Callable[[ChildProcess, str], None],
        verify: bool,
    ) -> None:
        self.child: ChildProcess | None = None
        self._spec = spec
        self._namespace = namespace
        self._pool = pool
        self._clock = clock
        self._log = log
        self._on_restart = on_restart
        self._on_death = on_death
        self._verify = verify
        self._opening_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Start the process and open the tier in it.

        Raises:
            ConfigError: a setting cannot work.
            BackendError: the backend cannot be imported in the process.
            TierError: the store cannot be reached, or the process died.
        """
        began_s = self._clock.now_s()
        self.child = await self._start()
        self._opening_s = self._clock.now_s() - began_s
        self._task = self._clock.spawn(self._supervise(), name=f"supervise {self._spec.name}")

    async def drain(self, timeout_s: float) -> bool:
        """Drain the tier; return true if everything has ended."""
        return self.child is None or await self.child.drain(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """Close the tier and end its process; kill it where it does not end.

        Args:
            timeout_s: how long it may take.
        """
        self._closing = True
        if self._task is None:
            return
        if self.child is not None:
            await self.child.end(timeout_s)
        else:
            self._task.cancel()
        await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Kill the process and wait until it is gone; for a loop that runs no more."""
        self._closing = True
        if self.child is not None:
            self.child.kill_and_wait()
            self._on_death(self.child, "its supervisor has ended")
            self.child = None

    async def _start(self) -> ChildProcess:
        pool_fd = copy_fd(self._pool.fd)
        try:
            return await self._start_with(pool_fd)
        finally:
            os.close(pool_fd)

    async def _start_with(self, pool_fd: int) -> ChildProcess:
        bootstrap: dict[str, Any] = write_bootstrap(
            self._spec,
            namespace=self._namespace,
            layout=self._pool.layout,
            pool_fd=pool_fd,
            verify=self._verify,
        )
        secrets = secrets_of(self._spec.config)
        child = ChildProcess(self._spec.name, self._clock, self._log, secrets)
        try:
            await child.start(bootstrap, pool_fd)
        except BaseException:
            await child.end(_CANCEL_S)
            child.data.close()
            raise
        return child

    async def _supervise(self) -> None:
        """Wait for the process's end, again and again, and start the next one."""
        pauses = RestartPauses()
        while self.child is not None:
            opened_s = self._clock.now_s()
            reason = f"the tier's process died: {await self.child.ended}"
            child, self.child = self.child, None
            if not self._closing:
                self._log.error("%s", reason)
            self._on_death(child, reason)
            child.let_go()
            if self._closing:
                return
            await self._restart(pauses, self._clock.now_s() - opened_s)

    async def _restart(self, pauses: RestartPauses, lived_s: float) -> None:
        limit_s = max(_REOPEN_S, 2 * self._opening_s)
        while self.child is None:
            pause_s = pauses.after(lived_s)
            self._log.info("the tier's process is restarted in %g s", pause_s)
            await self._clock.sleep(pause_s)
            try:
                # The engine waits for the first opening and can break it off; not for this one.
                async with self._clock.timeout(limit_s):
                    self.child = await self._start()
            except Exception as error:
                reason = str(error) or f"it did not open the tier within {limit_s:g} s"
                self._log.warning("the tier's process could not be restarted: %s", reason)
                lived_s = 0.0
        self._log.warning("the tier's process was restarted")
        self._on_restart(self.child)
