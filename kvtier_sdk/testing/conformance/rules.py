"""Definitions of checks, of their errors, and of the hooks that enable checks."""

from __future__ import annotations

import traceback
import unittest
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.types import Capability, Medium

if TYPE_CHECKING:
    from kvtier_sdk.testing.conformance.probe import Probe
    from kvtier_sdk.testing.conformance.subject import TierSubject


class ConformanceError(AssertionError):
    """A tier breaks a rule. The message contains the rule, the breach and the contract's sentence.

    Attributes:
        check: name of the check that failed.
        rule: the rule in one line.
    """

    def __init__(self, check: str, rule: str, breach: str, says: str) -> None:
        super().__init__(f'{rule}\n  found: {breach}\n  contract: "{says}"\n  check: {check}')
        self.check = check
        self.rule = rule


class CheckSkipped(unittest.SkipTest):
    """A check does not apply, for example because a hook is missing.

    Test frameworks report the check as skipped, and show the reason.
    """


class Breach(Exception):  # noqa: N818  # it becomes a ConformanceError, which has the suffix
    """A breach that a check has found. The kit turns it into a :class:`ConformanceError`."""


class NoRoom(Exception):  # noqa: N818
    """A tier that may be full has refused a chunk. The check ends, and counts as passed."""


class Hook(Enum):
    """Optional functions of a tier's author. Each enables further checks."""

    READ_RAW = "read_raw"
    WRITE_RAW = "write_raw"
    BREAK_CONNECTION = "break_connection"
    RESTORE_CONNECTION = "restore_connection"
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    LOSE_PART = "lose_part"
    BAD_SETTINGS = "bad_settings"
    SMALL_TIER = "small_tier"
    SHORT_LIVED_TIER = "short_lived_tier"
    AGING_TIER = "aging_tier"


_KIT = Path(__file__).parents[1]

#: A requirement of a check. The kit skips the check if the requirement is not met.
Need: TypeAlias = Capability | Hook | Medium

CheckFunction: TypeAlias = Callable[["TierSubject"], Coroutine[Any, Any, None]]
_OpenedCheck: TypeAlias = Callable[["TierSubject", "Probe"], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Check:
    """One rule, and the coroutine function that checks a tier against it.

    Attributes:
        name: the function's name.
        rule: the rule in one line.
        says: the sentence of the contract that states the rule.
        needs: the required capabilities, hooks or medium. Without them, the check is skipped.
        run: the coroutine function.
    """

    name: str
    rule: str
    says: str
    needs: tuple[Need, ...]
    run: CheckFunction


#: The rule that the state machine checks.
ANY_SEQUENCE = (
    "After any sequence of calls, a load returns what was stored under its key, or misses."
)
DECLINED = "write_raw declined every object"

_checks: dict[str, Check] = {}

#: Every check by name.
CHECKS: Mapping[str, Check] = MappingProxyType(_checks)


def check(*needs: Need, says: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a coroutine function as a check. The first line of its docstring is the rule."""

    def decorate(body: CheckFunction) -> CheckFunction:
        name = body.__name__
        rule = (body.__doc__ or "").partition("\n")[0]

        async def run(subject: TierSubject) -> None:
            _require(subject, needs)
            with judged(name, rule, says):
                await body(subject)

        _checks[name] = Check(name, rule, says, needs, run)
        return run

    return decorate


def check_opened(*needs: Need, says: str) -> Callable[[_OpenedCheck], CheckFunction]:
    """Register a check of an instance that the kit opens and closes."""

    def decorate(body: _OpenedCheck) -> CheckFunction:
        @check(*needs, says=says)
        @wraps(body)
        async def run(subject: TierSubject) -> None:
            async with subject.opened() as probe:
                await body(subject, probe)

        return run

    return decorate


def run_check(check: Check, subject: TierSubject) -> None:
    loop = subject.clock.new_event_loop()
    try:
        loop.run_until_complete(check.run(subject))
    finally:
        end_event_loop(loop, subject.clock)


@contextmanager
def judged(name: str, rule: str, says: str) -> Iterator[None]:
    """Turn a check's errors into :class:`ConformanceError`; ignore NoRoom, reraise CheckSkipped."""
    try:
        yield
    except Breach as breach:
        raise ConformanceError(name, rule, str(breach), says) from breach.__cause__
    except NoRoom:
        pass
    except CheckSkipped:
        raise
    except KVTierError as error:
        what = f"the store is in order, but the tier raised {type(error).__name__}: {error}"
        raise ConformanceError(name, rule, what, says) from error
    except Exception as error:
        # Catch every class of error, because hooks and the tier's constructor are foreign code.
        # Name the innermost line outside the kit, because the fault is not in the kit.
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not Path(frame.filename).is_relative_to(_KIT)]
        where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
        what = f"the check was ended by {type(error).__name__}: {error}{where}"
        raise ConformanceError(name, rule, what, says) from error


def _require(subject: TierSubject, needs: tuple[Need, ...]) -> None:
    for need in needs:
        if isinstance(need, Capability) and need not in subject.tier_class.capabilities:
            raise CheckSkipped(f"capability {need.name} is not declared")
        if isinstance(need, Medium) and need is not subject.tier_class.medium:
            raise CheckSkipped(
                f"medium {subject.tier_class.medium.name} is declared, not {need.name}"
            )
        if isinstance(need, Hook) and not subject.has(need):
            raise CheckSkipped(f"no hook: {need.value}")
