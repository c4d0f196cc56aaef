"""A misbehaving tier, and a test rig that runs the tier in a thread or a process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from kvtier_sdk import (
    Clock,
    ConfigError,
    HostPool,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    OffloadKey,
    PoolLayout,
    RequestContext,
    RunnerOptions,
    SystemClock,
    TierAuthError,
    TierContractError,
    TierError,
    TierSpec,
    TierTimeoutError,
    TierUnavailableError,
    Transfer,
    make_offload_key,
)
from kvtier_sdk.engine import TierClient, TierListener
from kvtier_sdk.runner import TierRunner, health
from kvtier_sdk.runner.factory import make_runner
from kvtier_sdk.runner.jobs import (
    Job,
    JobResult,
    MetricsChanged,
    Operation,
    Report,
    UsageChanged,
    Verdict,
)
from support.odd_answers import NONSENSE
from support.promises import fault_of_batch, fault_of_keys

NOBODY = RequestContext("nobody")
RUNNERS = ["thread", "process"]
CHUNK_BYTES = 4096
KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(64)]
_PATIENCE_S = 30.0


class ExpiredError(TierAuthError):
    """A backend's error class whose constructor does not take a message."""

    def __init__(self, account: str, days: int) -> None:
        super().__init__(f"the key of {account} expired {days} days ago", retryable=False)
        self.days = days


#: Errors, by the names of the actions that raise them.
ERRORS: dict[str, Callable[[], BaseException]] = {
    "refuse": lambda: TierUnavailableError("connection refused"),
    "dally": lambda: TierTimeoutError("no connection within 2 s"),
    "expire": lambda: ExpiredError("Ada", 3),
    "misconfigure": lambda: ConfigError("option 'bucket' names none"),
    "misbehave": lambda: ZeroDivisionError("a bug"),
    "exit": lambda: SystemExit(3),
    "panic": lambda: BaseException("a panic of a client in Rust"),
    "raise_cancelled": asyncio.CancelledError,
}
#: Actions that happen only at some of the attempts to open the tier.
AT_ATTEMPTS: dict[str, tuple[str, Callable[[int], object]]] = {
    "refuse_unless_third": ("refuse", lambda attempt: attempt % 3),
    "expire_once": ("expire", lambda attempt: attempt == 1),
    "leave_once": ("leave", lambda attempt: attempt == 1),
}


class MisbehavingConfig(MemoryTierConfig):
    diary: str = "/dev/null"
    on_init: str = ""
    on_open: str = ""
    on_lookup: str = ""
    on_load: str = ""
    on_close: str = ""
    answer: str = ""
    close_s: float = 0.0
    secret_key: SecretStr = SecretStr("")


class MisbehavingTier(MemoryTier):
    """A memory tier. Its ``on_`` options name actions, and the file ``diary`` records events."""

    config_model = MisbehavingConfig
    config: Any

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        if config.on_init:
            self._act(config.on_init)

    async def open(self) -> None:
        self._note("open")
        self._lookups = self.context.counter("lookups")
        self._stored = self.context.gauge("stored_chunks")
        await self._do(self.config.on_open)
        await super().open()
        self._note("opened")

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        _check(fault_of_keys(self, keys))
        self._lookups.add()
        await self._do(self.config.on_lookup)
        if self.config.answer:
            return self._answer(len(keys))
        return await super().lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        _check(fault_of_batch(self, batch))
        verdicts = await super().store(batch)
        self._stored.set(len(self._objects))
        return verdicts

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        _check(fault_of_batch(self, batch))
        await self._do(self.config.on_load)
        if self.config.answer:
            return self._answer(len(batch))
        return await super().load(batch)

    async def close(self) -> None:
        await asyncio.sleep(self.config.close_s)
        await self._do(self.config.on_close)
        self._note("closed")

    def _answer(self, count: int) -> Any:
        return NONSENSE[self.config.answer](count)

    def _past(self) -> str:
        return Path(self.config.diary).read_text()

    def _note(self, what: str) -> None:
        with open(self.config.diary, "a", encoding="utf-8") as diary:
            diary.write(f"{what}\n")

    async def _do(self, action: str) -> None:
        if action in ("hang_again", "refuse_again"):
            action = action.removesuffix("_again") if "opened" in self._past() else ""
        if action in ("hang", "cling"):
            self._note("hanging")
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self._note("cancelled")
                    if action == "hang":
                        raise
        elif action == "meet":
            while self._attempts() < 2:
                await asyncio.sleep(0.005)
        elif action:
            self._act(action)

    def _act(self, action: str) -> None:
        if action in AT_ATTEMPTS:
            action, happens = AT_ATTEMPTS[action]
            if not happens(self._attempts()):
                return
        if action in ERRORS:
            raise ERRORS[action]()
        getattr(self, f"_{action}")()

    def _lose_patience(self) -> None:
        """Make the runner treat every call as hung."""
        health._HANG_S = 1e-9

    def _miss_a_file(self) -> None:
        Path("/nonexistent").stat()

    def _exit_in_task(self) -> None:
        async def leave() -> None:
            raise SystemExit(3)

        task = asyncio.ensure_future(leave())
        # Retrieve the exception; otherwise asyncio would log it.
        task.add_done_callback(lambda task: task.exception())

    def _stop_the_loop(self) -> None:
        asyncio.get_running_loop().stop()

    def _block(self) -> None:
        self._note("blocking")
        released = Path(f"{self.config.diary}.released")
        while not released.exists():
            threading.Event().wait(0.005)

    def _hang_up(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
                if link.family is socket.AF_UNIX and link.getpeername() == "":
                    link.shutdown(socket.SHUT_RDWR)
        self._block()

    def _leave_a_copy(self) -> None:
        if os.fork() == 0:
            threading.Event().wait(20)
        os._exit(7)

    def _crash(self) -> None:
        ctypes.string_at(0)

    def _leave(self) -> None:
        os._exit(7)

    def _abort(self) -> None:
        """Abort, like a Rust library that is compiled to abort on a panic."""
        panic = b"panicked at client.rs:7: redis://u:secret@h is no URL of hunter2hunter2\n"
        os.write(2, panic)
        os.abort()

    def _warn(self) -> None:
        self.context.logger.warning("%d percent full", 90)
        self.context.logger.debug("not asked for")

    def _log_wrong(self) -> None:
        self.context.logger.warning("%s of %s, //u:pw@host", 3)

    def _let_go_of_text(self) -> None:
        self.context.report_removed(["a key"])  # type: ignore[list-item]

    def _print_raw(self) -> None:
        """Write to the standard streams without Python, as a C library does."""
        for stream_fd in (1, 2):
            os.write(stream_fd, b"last words")
            self._note(os.readlink(f"/proc/self/fd/{stream_fd}"))

    def _demand_secret(self) -> None:
        self._note("asked")
        if (
            self.config.secret_key.get_secret_value()
            != Path(f"{self.config.diary}.key").read_text()
        ):
            raise TierAuthError("wrong key")

    def _quote_secret(self) -> None:
        """Raise an error that quotes the secret, as a careless server's reply could."""
        secret = self.config.secret_key.get_secret_value()
        try:
            raise OSError(5, secret)
        except OSError as error:
            raise TierAuthError(f"ERR AUTH {secret} called without a password") from error

    def _wrap_secret(self) -> None:
        """Raise an error that keeps the secret in an attribute, and includes it in its text."""

        class WrapError(Exception):
            def __init__(self, inner: object) -> None:
                self.inner = inner

            def __str__(self) -> str:
                return f"{self.inner}"

        raise WrapError([self.config.secret_key.get_secret_value()])

    def _log_secret(self) -> None:
        try:
            self._quote_secret()
        except TierAuthError as error:
            self.context.logger.warning("retried: %s", error, exc_info=error)

    def _lose_task(self) -> None:
        async def leave() -> None:
            self._quote_secret()

        asyncio.ensure_future(leave())  # noqa: RUF006

    def _hold_interpreter(self) -> None:
        """Hold the interpreter lock, as some C libraries do while they connect."""
        ctypes.PyDLL(None).usleep(1_500_000)

    def _attempts(self) -> int:
        return self._past().split("\n").count("open")

    def _fail_differently(self) -> None:
        """Raise a different error at each of the first four attempts to open the tier."""
        actions = ["refuse", "expire", "misconfigure", "misbehave"]
        if self._attempts() <= len(actions):
            self._act(actions[self._attempts() - 1])


def _check(fault: str | None) -> None:
    if fault is not None:
        raise TierContractError(fault)


def misbehaving(
    kind: str,
    diary: Path,
    *,
    name: str = "held",
    runner: dict[str, Any] | None = None,
    **script: Any,
) -> TierSpec:
    """Return the spec of a tier that misbehaves as ``script`` says."""
    patience = dict.fromkeys(["lookup_deadline", "load_deadline", "store_deadline"], 60)
    return TierSpec(
        name,
        "memory",
        MisbehavingTier,
        MisbehavingConfig(diary=str(diary), **script),
        RunnerOptions.model_validate(
            {"runner": kind, "required": True, **patience, **(runner or {})}
        ),
    )


class SeenRunner:
    def __init__(self, runner: TierRunner) -> None:
        self.runner = runner
        self.others: list[Report] = []

    def poll(self) -> Sequence[Report]:
        reports = self.runner.poll()
        usual = JobResult, MetricsChanged, UsageChanged
        self.others += [report for report in reports if not isinstance(report, usual)]
        return reports

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


class Rig(TierListener):
    """Runs a misbehaving tier behind a tier client, and receives the client's results."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        *,
        clock: Clock | None = None,
        runner: dict[str, Any] | None = None,
        notifies: bool = True,
        engine_waits: bool = True,
        **script: Any,
    ) -> None:
        self.pool = HostPool.create(PoolLayout(8, CHUNK_BYTES))
        self.clock = clock or SystemClock()
        self.notified = threading.Event()
        self.results: list[JobResult] = []
        self._ids = itertools.count()
        self._diary = directory / "diary"
        spec = misbehaving(kind, self._diary, runner=runner, **script)
        if not engine_waits:
            spec = spec.in_background()
        self.runner = make_runner(
            spec,
            self.pool,
            namespace=Namespace({"model": "m", "dtype": "bfloat16"}),
            clock=self.clock,
            notify=self.notified.set if notifies else None,
        )
        seen = SeenRunner(self.runner)
        self.others = seen.others
        self.client = TierClient(
            spec,
            seen,  # type: ignore[arg-type]
            self,
            clock=self.clock,
            chunk_bytes=CHUNK_BYTES,
        )

    def open(self) -> Rig:
        self.client.open()
        return self

    def join(self) -> None:
        thread = self.runner._thread  # type: ignore[attr-defined]
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        assert job.result is not None
        self.results.append(job.result)

    stored = loaded = answered

    def past(self) -> list[str]:
        return self._diary.read_text().split("\n")[:-1] if self._diary.exists() else []

    def wait_past(self, what: str) -> None:
        for _ in range(6000):
            if any(line.startswith(what) for line in self.past()):
                return
            threading.Event().wait(0.005)
        raise AssertionError(f"not {what} but {self.past()}")

    def unblock(self) -> None:
        Path(f"{self._diary}.released").touch()

    def job(self, operation: Operation, *chunks: int) -> Job:
        """Create a job for numbered chunks, whose slots have the same numbers."""
        slots = chunks if operation in (Operation.LOAD, Operation.STORE) else ()
        deadline_s = self.clock.now_s() + 60
        keys = [KEYS[chunk] for chunk in chunks]
        return Job(next(self._ids), operation, keys, slots, NOBODY, deadline_s)

    def lookups(self, count: int) -> list[Job]:
        return [self.job(Operation.LOOKUP, 0, 1) for _ in range(count)]

    def submit(self, jobs: Sequence[Job]) -> None:
        self.client._collected += jobs
        self.client.flush()

    def take(self) -> list[str]:
        """Poll once, and return the first verdict of each result so far."""
        self.client.poll()
        return [result.verdicts[0].value for result in self.results]

    def wait_for(self, count: int, others: int = 0) -> list[str]:
        while len(verdicts := self.take()) < count or len(self.others) < others:
            assert self.notified.wait(_PATIENCE_S), f"{verdicts} and {self.others}, and no more"
            self.notified.clear()
        return verdicts

    def wait_open(self) -> None:
        self.wait_until(lambda: bool(self.client.stats.is_open))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(6000):
            self.client.poll()
            if condition():
                return
            threading.Event().wait(0.005)
        raise AssertionError(f"in vain; {self.past()}, {self.client.stats}")

    def do(self, operation: Operation, *chunks: int) -> list[str]:
        self.submit([self.job(operation, *chunks)])
        self.wait_for(len(self.results) + 1)
        return [verdict.value for verdict in self.results[-1].verdicts]

    def close(self) -> None:
        self.unblock()
        self.client.close(5.0)
        self.pool.close()


Make = Callable[..., Rig]


@contextlib.contextmanager
def rig_maker(kind: str, directory: Path, **usual: Any) -> Iterator[Make]:
    with contextlib.ExitStack() as ended:

        def make(**options: Any) -> Rig:
            rig = Rig(kind, directory, **{**usual, **options})
            ended.callback(rig.close)
            return rig

        yield make
