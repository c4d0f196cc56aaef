"""One process of a tier, seen from the engine: from its start until it is really gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvtier_sdk.clock import Clock, wait_out
from kvtier_sdk.errors import TierUnavailableError
from kvtier_sdk.jobs import IoEnded, Job, JobResult, JobTable, Report, Verdict
from kvtier_sdk.runner.order import read_error
from kvtier_sdk.runner.tier_log import TierLog
from kvtier_sdk.runner.wire import (
    FrameSplitter,
    Kind,
    WireError,
    frame,
    plain_frame,
    read_plain,
    read_reports,
    write_job,
)

# The same modules as here, wherever they were found; no secret is in their paths.
_PROGRAM = (
    "import sys; name, link, *sys.path = sys.argv[1:]; "
    "from kvtier_sdk.runner.child import main; main(int(link))"
)
#: How long the process and its end of the socket may differ about whether it is there.
_PARTING_S = 1.0
#: A process that leaves so much unread gets no more.
_MAX_UNREAD_BYTES = 8 << 20


class ChildProcess(asyncio.Protocol):
    """Starts a process, talks with it, and knows which jobs it has.

    All of it on the loop that made it. Nothing waits for the process but :attr:`ended`.

    Attributes:
        ended: done when the process is gone for good and all it wrote has been read; the result
            says what it died of.

    Args:
        name: the tier's.
        clock: time.
        report: takes what it reports.
        log: the tier's.
    """

    def __init__(
        self, name: str, clock: Clock, report: Callable[[Report], None], log: TierLog
    ) -> None:
        self._name = name
        self._clock = clock
        self._report = report
        self._log = log
        self._event_loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._event_loop.create_future()
        self._opened: asyncio.Future[None] = self._event_loop.create_future()
        self._drained: asyncio.Future[bool] | None = None
        self._jobs = JobTable()
        self._splitter = FrameSplitter()
        self._outgoing: list[bytes] = []
        self._link: socket.socket
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: threading.Thread | None = None
        # What it died of, and whether all that it wrote has been read.
        self._reason: str | None = None
        self._read_all = False

    async def start(self, order: Mapping[str, Any], pool_fd: int) -> None:
        """Start the process and have it open the tier.

        If this raises or is cancelled, :meth:`end` it.

        Args:
            order: what it builds the tier from.
            pool_fd: the pool's descriptor, which the process inherits under the same number.

        Raises:
            ConfigError: a setting cannot work.
            BackendError: the backend cannot be imported there.
            TierError: the store cannot be reached, or the process cannot be started or died.
        """
        self._link, theirs = socket.socketpair()
        with theirs:
            try:
                self._spawn(theirs.fileno(), pool_fd)
            except OSError as error:
                self._link.close()
                self.ended.set_result("it was not started")
                raise self._unavailable(f"its process cannot be started: {error}") from error
        await self._event_loop.create_unix_connection(lambda: self, sock=self._link)
        self._write(plain_frame(Kind.ORDER, order))
        await self._opened

    @property
    def pid(self) -> int | None:
        """Of the process, once it was started."""
        return None if self._process is None else self._process.pid

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over jobs. Each ends in one result, at the latest by :meth:`give_up`."""
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.refuse(jobs, Verdict.UNAVAILABLE, "the tier's process does not take its jobs")
            return
        written = []
        for job in jobs:
            try:
                written.append(write_job(job))
            except Exception:
                self._log.exception("a job could not be handed to the tier's process")
                self.refuse([job], Verdict.FAILED, "could not be handed to the tier's process")
            else:
                self._jobs.add(job)
        if written:
            self._write(frame(Kind.JOBS, b"".join(written)))

    def refuse(self, jobs: Sequence[Job], verdict: Verdict, reason: str | None = None) -> None:
        """Conclude jobs that the process does not get, or will not do any more."""
        for job in jobs:
            error = None if reason is None else f"{self._name} {job.operation.value}: {reason}"
            self._report(JobResult(job.job_id, [verdict] * len(job.keys), error=error))

    def give_up(self, verdict: Verdict, reason: str | None = None) -> None:
        """Conclude and release all jobs. The process must be gone: it writes to slots no more."""
        running, quarantined = self._jobs.take_all()
        self.refuse(running, verdict, reason)
        for job in quarantined:
            self._report(IoEnded(job.job_id))

    async def drain(self, timeout_s: float) -> bool:
        """As the tier loop's; a process that is gone has nothing left to end."""
        self._drained = self._event_loop.create_future()
        self._write(plain_frame(Kind.DRAIN, timeout_s))
        await self._within(2 * timeout_s + 0.5, self._drained, self.ended)
        return self.ended.done() or (self._drained.done() and self._drained.result())

    async def end(self, patience_s: float) -> None:
        """Have the tier closed and the process ended; kill it where it does not.

        Cancelled, it is killed at once. Either way it is gone when this has returned.

        Args:
            patience_s: how long it may take.
        """
        self._write(plain_frame(Kind.CLOSE, patience_s / 2))
        try:
            if not await self._within(patience_s, self.ended):
                self._log.warning(
                    "the tier did not close within %g s; its process is killed", patience_s
                )
        finally:
            self.kill()
            await wait_out([self.ended])

    def kill(self) -> None:
        """Kill the process, if it is still there."""
        if self._process is not None:
            self._process.kill()

    def kill_and_wait(self) -> None:
        """Kill the process and block until it is gone; for a loop that runs no more."""
        self.kill()
        if self._reaper is not None:
            self._reaper.join()

    async def _within(self, patience_s: float, *futures: asyncio.Future[Any]) -> bool:
        """Wait until one of the futures is done; whether one was in time."""
        try:
            async with self._clock.timeout(patience_s):
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return False
        return True

    # --- the socket ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._splitter.split(data):
                self._take(kind, body)
        except (WireError, LookupError, TypeError, ValueError) as error:
            self._log.error("the tier's process is killed: it sent %s", error)
            self._close_link()
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_all = True
        self._conclude()
        if self._reason is None:
            # What makes a process close its end makes it end too, or it is of no more use.
            self._clock.call_at(self._clock.now_s() + _PARTING_S, self.kill)

    def _take(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.REPORTS:
            for report in read_reports(body):
                self._take_report(report)
        elif kind is Kind.LOG:
            level, text = read_plain(body)
            self._log.logger.log(level, "%s", text)
        elif kind is Kind.OPENED and not self._opened.done():
            self._opened.set_result(None)
        elif kind is Kind.REFUSED and not self._opened.done():
            self._opened.set_exception(read_error(read_plain(body)))
        elif kind is Kind.DRAIN and self._drained is not None and not self._drained.done():
            self._drained.set_result(bool(read_plain(body)))

    def _take_report(self, report: Report) -> None:
        if isinstance(report, JobResult):
            job = self._jobs.conclude(report.job_id)
            if job is None or len(report.verdicts) != len(job.keys):
                raise WireError("a result that fits no job")
            if report.released:
                self._jobs.release(report.job_id)
        elif isinstance(report, IoEnded) and self._jobs.release(report.job_id) is None:
            raise WireError("the end of a job that was not under way")
        self._report(report)

    def _write(self, data: bytes) -> None:
        """Write it together with all else that this turn of the loop brings."""
        if not self._outgoing:
            self._event_loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        data, self._outgoing = b"".join(self._outgoing), []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _close_link(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif not self._read_all:
            self._link.close()
            self.connection_lost(None)

    # --- the process --------------------------------------------------------------------------

    def _spawn(self, link_fd: int, pool_fd: int) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, self._name, str(link_fd), *path],
            pass_fds=[link_fd, pool_fd],
            stdin=subprocess.DEVNULL,
            # A terminal's Ctrl-C is the engine's.
            process_group=0,
        )
        self._reaper = threading.Thread(
            target=self._reap, args=(self._process,), name=f"kvtier-{self._name}-wait", daemon=True
        )
        self._reaper.start()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own: wait for the process's end."""
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._event_loop.call_soon_threadsafe(self._reaped, code)

    def _reaped(self, code: int) -> None:
        self._reason = f"signal {-code}" if code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            self._reason += " (killed, perhaps for want of memory)"
        self._conclude()
        if not self._read_all:
            # Somebody whom it forked may hold its end of the socket.
            self._clock.call_at(self._clock.now_s() + _PARTING_S, self._close_link)

    def _conclude(self) -> None:
        """The process is gone when both of its ends have come."""
        if self._reason is None or not self._read_all or self.ended.done():
            return
        if not self._opened.done():
            self._opened.set_exception(
                self._unavailable(f"the tier's process died: {self._reason}")
            )
            # Nobody may be waiting for it any more.
            self._opened.exception()
        self.ended.set_result(self._reason)

    def _unavailable(self, message: str) -> TierUnavailableError:
        error = TierUnavailableError(message)
        error.tier, error.operation = self._name, "open"
        return error
