"""One process of a tier, seen from the engine: from its start until it is really gone."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtier_sdk.aio.clock import Clock, wait_out
from kvtier_sdk.errors import TierUnavailableError
from kvtier_sdk.runner.jobs import IoEnded, Job, JobResult, JobTable, Report, Verdict
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.process.bootstrap import read_error
from kvtier_sdk.runner.process.channel import Channel
from kvtier_sdk.runner.process.codec import (
    Kind,
    MessageError,
    message,
    plain_message,
    read_plain,
    read_reports,
    write_job,
)

# The same modules as here, wherever they were found; no secret is in their paths.
_PROGRAM = (
    "import sys; name, link, *sys.path = sys.argv[1:]; "
    "from kvtier_sdk.runner.process.child import main; main(int(link))"
)
#: How long the process and its end of the socket may differ about whether it is there.
_PARTING_S = 1.0
#: What comes of reading a message that this release does not write.
_NONSENSE = (MessageError, LookupError, TypeError, ValueError)
#: How often somebody looks after a process, and reads what the engine has not.
_WATCH_S = 1.0
#: A process that has a job past its deadline and reports nothing, at so many looks in a row, is
#: stuck: a loop that runs would have concluded the job. Looks, not seconds: when the whole machine
#: was suspended nobody is stuck.
_STUCK_LOOKS = 10


class ChildProcess:
    """Starts a process, talks with it, and knows which jobs it has.

    On the loop that made it; :meth:`submit` and :meth:`collect` on any thread. Nothing waits for
    the process but :attr:`ended`.

    Attributes:
        ended: done when the process is gone for good and all it wrote has been read; the result
            says what it died of.

    Args:
        name: the tier's.
        clock: time.
        report: takes what it reports, on the thread that collects it.
        log: the tier's.
        attentive: whether the loop collects what arrives at once. Otherwise the engine does when
            it polls, and no thread of its process is woken up.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        report: Callable[[Report], None],
        log: TierLog,
        *,
        attentive: bool,
    ) -> None:
        self._name = name
        self._clock = clock
        self._report = report
        self._log = log
        self._attentive = attentive
        self._event_loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._event_loop.create_future()
        self._opened: asyncio.Future[None] = self._event_loop.create_future()
        self._drained: asyncio.Future[bool] | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            self._theirs = socket.socket(fileno=copy_fd(theirs.fileno()))
        self._channel = Channel(ours, self._event_loop)
        # Of the jobs and of what is read: no result is missed, none is taken twice.
        self._lock = threading.Lock()
        self._jobs = JobTable()
        self._gone = False
        self._reported = False
        self._silent_looks = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: threading.Thread | None = None
        # Why it was killed, what it died of, and whether the last that it wrote has been read.
        self._killed_for: str | None = None
        self._reason: str | None = None
        self._ending_link = False

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
        with self._theirs:
            try:
                self._spawn(self._theirs.fileno(), pool_fd)
            except Exception as error:  # no process, no thread that waits for it, a bad argument
                self._channel.close()
                if self._process is not None:
                    self._process.kill()
                    self._process.wait()
                self.ended.set_result("it was not started")
                raise self._unavailable(f"its process cannot be started: {error}") from error
        self._channel.write(plain_message(Kind.BOOTSTRAP, order))
        self._channel.attend(self.collect)
        await self._opened
        if not self._attentive:
            self._channel.ignore()
        self._watch()

    @property
    def pid(self) -> int | None:
        """Of the process, once it was started."""
        return None if self._process is None else self._process.pid

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over jobs. Each ends in one result, at the latest by :meth:`give_up`."""
        written = []
        with self._lock:
            if self._gone or self._channel.is_full:
                reason = "is gone" if self._gone else "does not take its jobs"
                self.refuse(jobs, Verdict.UNAVAILABLE, f"the tier's process {reason}")
                return
            for job in jobs:
                try:
                    written.append(write_job(job))
                except Exception:
                    self._log.exception("a job could not be handed to the tier's process")
                    self.refuse([job], Verdict.FAILED, "could not be handed to the tier's process")
                else:
                    self._jobs.add(job)
            if written:
                self._channel.write(message(Kind.JOBS, b"".join(written)))

    def collect(self) -> None:
        """Report what has arrived. Waits for nothing."""
        with self._lock:
            try:
                for kind, body in self._channel.read():
                    self._take(kind, body)
            except _NONSENSE as error:
                self._channel.at_end = True
                self._soon(self._distrust, error)
            if self._channel.at_end and not self._ending_link:
                self._ending_link = True
                self._soon(self._end_link)

    def refuse(self, jobs: Sequence[Job], verdict: Verdict, reason: str | None = None) -> None:
        """Conclude jobs that the process does not get, or will not do any more."""
        for job in jobs:
            error = None if reason is None else f"{self._name} {job.operation.value}: {reason}"
            self._report(JobResult(job.job_id, [verdict] * len(job.keys), error=error))

    def give_up(self, verdict: Verdict, reason: str | None = None) -> None:
        """Conclude and release all jobs. The process must be gone: it writes to slots no more."""
        with self._lock:
            self._gone = True
            running, quarantined = self._jobs.take_all()
        self.refuse(running, verdict, reason)
        for job in quarantined:
            self._report(IoEnded(job.job_id))

    async def drain(self, timeout_s: float) -> bool:
        """As the tier loop's; a process that is gone has nothing left to end."""
        self._drained = self._event_loop.create_future()
        with self._attending():
            self._channel.write(plain_message(Kind.DRAIN, timeout_s))
            await self._within(2 * timeout_s + 0.5, self._drained, self.ended)
        return self.ended.done() or (self._drained.done() and self._drained.result())

    async def end(self, patience_s: float) -> None:
        """Have the tier closed and the process ended; kill it where it does not.

        Cancelled, it is killed at once. Either way it is gone when this has returned.

        Args:
            patience_s: how long it may take.
        """
        self._attentive = True
        with self._attending():
            self._channel.write(plain_message(Kind.CLOSE, patience_s / 2))
            try:
                if not await self._within(patience_s, self.ended):
                    self._log.warning(
                        "the tier did not close within %g s; its process is killed", patience_s
                    )
            finally:
                self.kill()
                await wait_out([self.ended])

    def kill(self, reason: str | None = None) -> None:
        """Kill the process, if it is still there.

        Args:
            reason: for which, where it shall be said.
        """
        if self._process is not None:
            self._killed_for = self._killed_for or reason
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

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        """Collect at once while the engine waits and does not poll."""
        self._channel.attend(self.collect)
        try:
            yield
        finally:
            if not self._attentive:
                self._channel.ignore()

    def _watch(self) -> None:
        """Now and then: collect for an engine that does not poll, kill a process that is stuck."""
        if self.ended.done():
            return
        self.collect()
        now_s = self._clock.now_s()
        with self._lock:
            silent = not self._reported and bool(self._jobs.overdue(now_s, 0.0))
            self._reported = False
        self._silent_looks = self._silent_looks + 1 if silent else 0
        if self._silent_looks >= _STUCK_LOOKS:
            self.kill("it was stuck, and was killed")
        self._clock.call_at(now_s + _WATCH_S, self._watch)

    # --- what arrives -------------------------------------------------------------------------

    def _take(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.REPORTS:
            self._reported = True
            for report in read_reports(body):
                self._take_report(report)
        else:
            self._soon(self._take_word, kind, body)

    def _take_report(self, report: Report) -> None:
        if isinstance(report, JobResult):
            job = self._jobs.conclude(report.job_id)
            if job is None or len(report.verdicts) != len(job.keys):
                if job is not None:
                    # It has had no result yet: that comes when the process is gone.
                    self._jobs.release(report.job_id)
                    self._jobs.add(job)
                raise MessageError("a result that fits no job")
            if report.released:
                self._jobs.release(report.job_id)
        elif isinstance(report, IoEnded) and self._jobs.release(report.job_id) is None:
            raise MessageError("the end of a job that was not under way")
        self._report(report)

    def _take_word(self, kind: Kind, body: bytes) -> None:
        try:
            if kind is Kind.LOG:
                level, text = read_plain(body)
                self._log.logger.log(level, "%s", text)
            elif kind is Kind.OPENED and not self._opened.done():
                self._opened.set_result(None)
            elif kind is Kind.REFUSED and not self._opened.done():
                self._opened.set_exception(read_error(read_plain(body)))
            elif kind is Kind.DRAIN and self._drained is not None and not self._drained.done():
                self._drained.set_result(bool(read_plain(body)))
            elif kind is Kind.HUNG:
                self.kill("calls hung, and it was killed")
        except _NONSENSE as error:
            self._distrust(error)

    def _distrust(self, error: Exception) -> None:
        self._log.error("the tier's process is killed: it sent %s", error)
        self.kill()
        self._end_link()

    def _end_link(self) -> None:
        """Nothing more is read."""
        with self._lock:
            self._channel.close()
        self._conclude()
        if self._reason is None:
            # What makes a process close its end makes it end too, or it is of no more use.
            self._clock.call_at(self._clock.now_s() + _PARTING_S, self.kill)

    def _soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call it on the loop."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._event_loop.call_soon_threadsafe(callback, *args)

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
        self._soon(self._reaped, code)

    def _reaped(self, code: int) -> None:
        self._reason = self._killed_for or _end_in_words(code)
        self._conclude()
        # All that it wrote is there. Somebody whom it forked may hold its end of the socket.
        self.collect()
        self._clock.call_at(self._clock.now_s() + _PARTING_S, self._end_link)

    def _conclude(self) -> None:
        """The process is gone when both of its ends have come."""
        if self._reason is None or not self._channel.is_closed or self.ended.done():
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


def copy_fd(fd: int) -> int:
    """Copy a descriptor for a process, in which 0 to 2 are the standard streams.

    In an engine that was started without these, anything may have their numbers.

    Args:
        fd: a descriptor.

    Returns:
        Another one of the same file, which the caller closes.
    """
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _end_in_words(code: int) -> str:
    """What a process's exit code says of its end."""
    if code == -signal.SIGKILL:
        return f"signal {-code} (killed, perhaps for want of memory)"
    return f"signal {-code}" if code < 0 else f"exit status {code}"
