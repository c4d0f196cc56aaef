"""The class that an author subclasses: every check as a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier_sdk.namespace import Namespace
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.testing.conformance.machine import tier_state_machine
from kvtier_sdk.testing.conformance.rules import CHECKS, Check, CheckSkipped, Hook
from kvtier_sdk.testing.conformance.subject import TierLike, TierSubject
from kvtier_sdk.types import OffloadKey


class TierConformance:
    """Holds a tier to the contract: one test a rule. Subclass it, and override :meth:`tier`.

    ::

        class TestMyTier(TierConformance):
            @pytest.fixture
            def tier(self, tmp_path):
                return f"mine:{tmp_path}"

    Every hook that is overridden too (:meth:`read_raw` and those after it) lets more rules be
    checked; one that is not skips those with ``no hook`` and its name. A hook may be a coroutine
    function. It is called on the loop of the check, so that a server which the tests bring
    themselves needs a thread or a process of its own.

    Tests need no plugin: each runs on an event loop of its own.

    Attributes:
        chunk_bytes: length of a payload.
        keeps_chunks: ``False`` for a tier that may refuse every store for want of room.
        patience_s: after which a call counts as one that never ends.
        blocking_s: after which a loop that does not turn counts as blocked.
        settle_s: how long to wait for what should not happen.
        sequences: how many sequences of calls are compared with a dictionary.
    """

    chunk_bytes: ClassVar[int] = TierSubject.chunk_bytes
    keeps_chunks: ClassVar[bool] = TierSubject.keeps_chunks
    patience_s: ClassVar[float] = TierSubject.patience_s
    blocking_s: ClassVar[float] = TierSubject.blocking_s
    settle_s: ClassVar[float] = TierSubject.settle_s
    sequences: ClassVar[int] = 20

    @pytest.fixture
    def tier(self) -> TierLike:
        """The tier, with room for eight chunks. Override it.

        Returns:
            A URL, an entry of options, a validated one, or a class that does without options.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture 'tier': return the tier's URL or options from it"
        )

    @cached_property
    def namespace(self) -> Namespace:
        """Of the chunks; each test has one of its own."""
        return TierSubject.new_namespace()

    def read_raw(self, key: OffloadKey) -> bytes | Awaitable[bytes | None] | None:
        """Read, past the tier, what is stored in :attr:`namespace`.

        Args:
            key: the chunk.

        Returns:
            The object, or ``None`` where there is none.
        """
        raise NotImplementedError

    def write_raw(self, key: OffloadKey, data: bytes) -> Awaitable[None] | None:
        """Replace, past the tier, what is stored in :attr:`namespace`.

        Args:
            key: a chunk that was stored before.
            data: the new object, of any length.
        """
        raise NotImplementedError

    def break_connection(self) -> Awaitable[None] | None:
        """Make the store unreachable, as an outage would."""
        raise NotImplementedError

    def restore_connection(self) -> Awaitable[None] | None:
        """End the outage."""
        raise NotImplementedError

    def bad_settings(self) -> Mapping[str, TierLike]:
        """Tiers that cannot be opened.

        Returns:
            What is wrong in words, to the tier with that setting.
        """
        raise NotImplementedError

    def small_tier(self, object_bytes: int) -> TierLike:
        """A tier that is soon full.

        Args:
            object_bytes: length of each object.

        Returns:
            A tier with room for less than a hundred objects.
        """
        raise NotImplementedError

    @pytest.fixture
    def subject(self, tier: TierLike) -> TierSubject:
        """The tier with all hooks that are given."""
        given: dict[str, Any] = {
            hook.value: getattr(self, hook.value)
            for hook in Hook
            if getattr(type(self), hook.value) is not getattr(TierConformance, hook.value)
        }
        if Hook.BAD_SETTINGS.value in given:
            given[Hook.BAD_SETTINGS.value] = self.bad_settings()
        return TierSubject(
            tier,
            chunk_bytes=self.chunk_bytes,
            keeps_chunks=self.keeps_chunks,
            patience_s=self.patience_s,
            blocking_s=self.blocking_s,
            settle_s=self.settle_s,
            namespace=self.namespace,
            **given,
        )

    def test_any_sequence_of_calls(self, subject: TierSubject) -> None:
        """Whatever is called in whatever order, a load brings what was stored, or nothing."""
        run_state_machine_as_test(
            tier_state_machine(lambda: subject),
            settings=settings(
                max_examples=self.sequences,
                stateful_step_count=20,
                # A store may be slow, and the machine busy.
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def run_check(check: Check, subject: TierSubject) -> None:
    """Run a check on an event loop of its own, and end the loop.

    Args:
        check: one of :data:`CHECKS`.
        subject: the tier under test.

    Raises:
        ConformanceError: the tier breaks the rule.
        CheckSkipped: the check does not apply.
    """
    loop = subject.clock.new_event_loop()
    try:
        loop.run_until_complete(_awaited(check, subject))
    finally:
        end_event_loop(loop, subject.clock)


async def _awaited(check: Check, subject: TierSubject) -> None:
    await check.run(subject)


def _test_of(check: Check) -> Callable[[TierConformance, TierSubject], None]:
    def test(self: TierConformance, subject: TierSubject) -> None:
        try:
            run_check(check, subject)
        except CheckSkipped as skipped:
            pytest.skip(str(skipped))

    test.__name__ = check.name.replace("check_", "test_", 1)
    test.__qualname__ = f"{TierConformance.__name__}.{test.__name__}"
    test.__doc__ = check.rule
    return test


for _check in CHECKS.values():
    setattr(TierConformance, _check.name.replace("check_", "test_", 1), _test_of(_check))
