"""A state machine that compares a tier with a dictionary over random sequences of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier_sdk.errors import TierCapacityError
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import Probe, describe, is_miss, start_and_cancel
from kvtier_sdk.testing.conformance.rules import (
    ANY_SEQUENCE,
    Breach,
    ConformanceError,
    judged,
)
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability

T = TypeVar("T")

_SAYS = "Results have the order and the length of the batch."
SEQUENCES = 20  # how many random sequences of calls to run
SHRINK_S = 20  # how long to search for a shorter failing sequence
_KEYS = 4
_BATCHES = st.lists(st.integers(0, _KEYS - 1), max_size=6)
_CHUNKS = st.integers(0, _KEYS - 1)
_TURNS = st.integers(0, 12)


class TierMachine(RuleBasedStateMachine):
    """A state machine that calls a tier, and records the versions that a load may return."""

    make_subject: ClassVar[Callable[[], TierSubject]]  # called once for each sequence of calls

    def __init__(self) -> None:
        super().__init__()
        self._subject = type(self).make_subject()
        self._loop = self._subject.clock.new_event_loop()
        self._keys = self._subject.new_keys(_KEYS)
        self._may_hold: list[set[int]] = [set() for _ in self._keys]  # versions a load may return
        self._versions = 0
        self._cancelled: set[int] = set()  # versions whose store may still end after a deletion
        self._run(self._open())

    @rule(chunks=_BATCHES)
    def store(self, chunks: Sequence[int]) -> None:
        self._run(self._store(chunks))

    @rule(chunks=_BATCHES)
    def load(self, chunks: Sequence[int]) -> None:
        self._run(self._load(chunks))

    @rule(chunks=_BATCHES)
    def lookup(self, chunks: Sequence[int]) -> None:
        self._run(self._lookup(chunks))

    @rule(stored=_BATCHES, loaded=_BATCHES)
    def store_and_load_at_once(self, stored: Sequence[int], loaded: Sequence[int]) -> None:
        async def both() -> None:
            await asyncio.gather(self._store(stored), self._load(loaded))

        self._run(both())

    @rule(operation=st.sampled_from(["store", "load"]), chunk=_CHUNKS, turns=_TURNS)
    def cancel(self, operation: str, chunk: int, turns: int) -> None:
        self._run(self._cancel(operation, chunk, turns))

    @rule()
    def reopen(self) -> None:
        self._run(self._probe.close())
        self._run(self._open())

    @precondition(lambda self: self._can(Capability.DELETE))
    @rule(chunks=_BATCHES)
    def delete(self, chunks: Sequence[int]) -> None:
        self._run(self._probe.delete([self._keys[chunk] for chunk in chunks]))
        for chunk in chunks:
            self._may_hold[chunk] &= self._cancelled

    @precondition(lambda self: self._can(Capability.TOUCH))
    @rule(chunks=_BATCHES)
    def touch(self, chunks: Sequence[int]) -> None:
        self._run(self._probe.touch([self._keys[chunk] for chunk in chunks]))

    @precondition(lambda self: self._can(Capability.SCAN))
    @rule()
    def scan(self) -> None:
        self._run(self._scan())

    def teardown(self) -> None:
        try:
            self._loop.run_until_complete(self._probe.clean_up())
        finally:
            end_event_loop(self._loop, self._subject.clock)

    async def _open(self) -> None:
        self._probe = Probe(self._subject, self._subject.make())
        await self._probe.open()

    async def _store(self, chunks: Sequence[int]) -> None:
        batch = [self._full(chunk, self._new_version(chunk)) for chunk in chunks]
        for verdict in await self._probe.store(batch):
            if verdict is not None and not isinstance(verdict, TierCapacityError):
                raise Breach(f"the store is in order, but storing gave {describe(verdict)}")

    async def _load(self, chunks: Sequence[int]) -> None:
        batch = [self._probe.empty(self._keys[chunk]) for chunk in chunks]
        verdicts = await self._probe.load(batch)
        for chunk, lent, verdict in zip(chunks, batch, verdicts, strict=True):
            if verdict is None:
                allowed = [
                    self._probe.content(lent.key, version, self._length(version))
                    for version in self._may_hold[chunk]
                ]
                self._probe.check_found(lent.content, allowed)
            elif not is_miss(verdict):
                raise Breach(f"the store is in order, but loading gave {describe(verdict)}")

    async def _lookup(self, chunks: Sequence[int]) -> None:
        answers = await self._probe.lookup([self._keys[chunk] for chunk in chunks])
        for chunk, answer in zip(chunks, answers, strict=True):
            if answer and not self._may_hold[chunk]:
                raise Breach("lookup returned True for a chunk that is not stored")

    async def _scan(self) -> None:
        listed = {entry.key for entry in await self._probe.scan()}
        for key, versions in zip(self._keys, self._may_hold, strict=True):
            if key in listed and not versions:
                raise Breach("scan lists a chunk that is not stored")

    async def _cancel(self, operation: str, chunk: int, turns: int) -> None:
        if operation == "store":
            version = self._new_version(chunk)
            self._cancelled.add(version)
            lent = self._full(chunk, version)
        else:
            lent = self._probe.empty(self._keys[chunk])
        if not await start_and_cancel(self._probe, operation, lent, turns):
            raise Breach(f"a cancelled {operation} did not end")
        # Fill the buffers with zeros. If the tier still reads them, a later load finds the zeros.
        lent.fill(bytes(lent.transfer.object_bytes))

    def _full(self, chunk: int, version: int) -> LentBuffers:
        length = self._length(version)
        return self._probe.full(self._keys[chunk], version, object_bytes=length)

    def _length(self, version: int) -> int:
        lengths = self._probe.object_lengths()
        return lengths[version % len(lengths)]

    def _new_version(self, chunk: int) -> int:
        self._versions += 1
        self._may_hold[chunk].add(self._versions)
        return self._versions

    def _can(self, capability: Capability) -> bool:
        return capability in self._subject.tier_class.capabilities

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with judged("tier_state_machine", ANY_SEQUENCE, _SAYS):
            return self._loop.run_until_complete(coroutine)


def tier_state_machine(make_subject: Callable[[], TierSubject]) -> type[TierMachine]:
    """Create a Hypothesis state machine that compares a tier with a dictionary.

    ::

        TestMyTier = tier_state_machine(lambda: TierSubject("mine:/tmp/x")).TestCase

    The machine calls ``make_subject`` once for each sequence of calls. The function may return
    the same subject each time. pytest and unittest collect the machine's ``TestCase``.
    """
    return type("TierMachine", (TierMachine,), {"make_subject": staticmethod(make_subject)})


def run_sequences(
    subject: TierSubject, sequences: int = SEQUENCES, shrink_s: int = SHRINK_S
) -> None:
    """Run the state machine; raise :class:`ConformanceError` for the shortest failing sequence."""
    # Hypothesis searches for a shorter sequence for up to five minutes, and has no setting for this
    # limit. A hanging tier would take all of this time, because each sequence waits for a timeout.
    before, engine.MAX_SHRINKING_SECONDS = engine.MAX_SHRINKING_SECONDS, shrink_s
    try:
        run_state_machine_as_test(
            tier_state_machine(lambda: subject),
            settings=settings(
                max_examples=sequences,
                stateful_step_count=20,
                # Raise one failure, not an exception group.
                report_multiple_bugs=False,
                # Set no deadline, because the store may be slow and the machine busy.
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except FlakyFailure as flaky:
        # Raise the breach itself, although Hypothesis could not repeat it with the same calls.
        failures, _ = flaky.split(ConformanceError)
        raise flaky if failures is None else failures.exceptions[0] from flaky
    finally:
        engine.MAX_SHRINKING_SECONDS = before
