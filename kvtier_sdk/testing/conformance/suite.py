"""The test class that a tier's author subclasses, with one test for each check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import pytest

from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.machine import SEQUENCES, SHRINK_S, run_sequences
from kvtier_sdk.testing.conformance.rules import CHECKS, Check, Hook, run_check
from kvtier_sdk.testing.conformance.subject import TierLike, TierSubject
from kvtier_sdk.types import OffloadKey

_SETTINGS = ("chunk_bytes", "keeps_chunks", "timeout_s", "blocking_s", "settle_s", "hang_s")


class TierConformance:
    """A test class that checks a tier against the contract, with one test for each rule.

    Subclass it and override the fixture :meth:`tier`::

        class TestMyTier(TierConformance):
            @pytest.fixture
            def tier(self, tmp_path):
                return f"mine:{tmp_path}"

    To enable further tests, override the hooks: :meth:`read_raw` and the methods after it. A test
    without its hook is skipped, with the reason ``no hook`` and the hook's name. A hook can be a
    coroutine function. Hooks run on the check's event loop, so run the server of your tests in
    another thread or process.

    The tests need no pytest plugin, because each test has its own event loop.

    Attributes:
        chunk_bytes: the length of a payload.
        keeps_chunks: false for a tier that may refuse every store for lack of room.
        timeout_s: seconds after which a running call counts as hung.
        blocking_s: seconds after which a stalled event loop counts as blocked.
        settle_s: seconds to wait for an effect that must not occur, such as a late write.
        hang_s: seconds for which the store hangs; choose more than the tier's own timeouts.
        sequences: number of random sequences of calls, each compared with a dictionary.
        shrink_s: seconds to search for a shorter sequence once a sequence has failed.
    """

    chunk_bytes: ClassVar[int] = TierSubject.chunk_bytes
    keeps_chunks: ClassVar[bool] = TierSubject.keeps_chunks
    timeout_s: ClassVar[float] = TierSubject.timeout_s
    blocking_s: ClassVar[float] = TierSubject.blocking_s
    settle_s: ClassVar[float] = TierSubject.settle_s
    hang_s: ClassVar[float] = TierSubject.hang_s
    sequences: ClassVar[int] = SEQUENCES
    shrink_s: ClassVar[int] = SHRINK_S

    @pytest.fixture
    def tier(self) -> TierLike:
        """Return a tier with room for eight chunks: a URL, options, a spec or a class."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture 'tier': write one that returns the tier's URL "
            "or options"
        )

    @cached_property
    def namespace(self) -> Namespace:
        """The namespace of the chunks; a new one for each test."""
        return TierSubject.new_namespace()

    def read_raw(self, key: OffloadKey) -> bytes | Awaitable[bytes | None] | None:
        """Return the object ``key`` of :attr:`namespace` from the store, or ``None`` if absent."""
        raise NotImplementedError

    def write_raw(self, key: OffloadKey, data: bytes) -> Awaitable[bool | None] | bool | None:
        """Replace the stored object ``key`` of :attr:`namespace` by ``data``, of any length.

        Return ``False`` if the store cannot hold such an object; the check then skips that object.
        """
        raise NotImplementedError

    def break_connection(self) -> Awaitable[None] | None:
        """Make the store unreachable, as an outage would."""
        raise NotImplementedError

    def restore_connection(self) -> Awaitable[None] | None:
        """End the outage."""
        raise NotImplementedError

    def freeze(self) -> Awaitable[None] | None:
        """Make the store hang (``SIGSTOP``), so that it accepts connections but does not answer."""
        raise NotImplementedError

    def unfreeze(self) -> Awaitable[None] | None:
        """End the hang (``SIGCONT``)."""
        raise NotImplementedError

    def lose_part(self, key: OffloadKey) -> Awaitable[None] | None:
        """Remove part of the stored object ``key`` directly in the store, as an eviction would.

        Override this if the tier keeps a chunk as several values, files or shards. Then make
        :attr:`chunk_bytes` large enough for several parts.
        """
        raise NotImplementedError

    def bad_settings(self) -> Mapping[str, TierLike]:
        """Return tiers whose ``open`` must fail; each key describes the bad setting."""
        raise NotImplementedError

    def small_tier(self, object_bytes: int) -> TierLike:
        """Return a tier with room for fewer than a hundred objects of ``object_bytes``."""
        raise NotImplementedError

    def short_lived_tier(self) -> TierLike:
        """Return a tier whose chunks expire a second after they were stored."""
        raise NotImplementedError

    def aging_tier(self) -> TierLike:
        """Return a tier whose chunks expire two seconds after they were stored, even if used.

        If the tier also limits the time since the last use, set that limit to one second.
        """
        raise NotImplementedError

    @pytest.fixture
    def subject(self, tier: TierLike) -> TierSubject:
        given: dict[str, Any] = {
            hook.value: getattr(self, hook.value)
            for hook in Hook
            if getattr(type(self), hook.value) is not getattr(TierConformance, hook.value)
        }
        if Hook.BAD_SETTINGS.value in given:
            given[Hook.BAD_SETTINGS.value] = self.bad_settings()
        given |= {name: getattr(self, name) for name in _SETTINGS}
        return TierSubject(tier, namespace=self.namespace, **given)


def _test_of(check: Check) -> Callable[[TierConformance, TierSubject], None]:
    def test(self: TierConformance, subject: TierSubject) -> None:
        __tracebackhide__ = True
        run_check(check, subject)

    test.__name__ = check.name.replace("check_", "test_", 1)
    test.__qualname__ = f"{TierConformance.__name__}.{test.__name__}"
    test.__doc__ = check.rule
    return test


def _test_any_sequence_of_calls(self: TierConformance, subject: TierSubject) -> None:
    """After any sequence of calls, a load returns what was stored under its key, or misses."""
    __tracebackhide__ = True
    run_sequences(subject, self.sequences, self.shrink_s)


for _check in CHECKS.values():
    setattr(TierConformance, _check.name.replace("check_", "test_", 1), _test_of(_check))
# Run this test last, because it fails slowly and other tests describe a breach more exactly.
TierConformance.test_any_sequence_of_calls = _test_any_sequence_of_calls  # type: ignore[attr-defined]
