"""Runs the whole kit without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Literal

from kvtier_sdk.testing.conformance.rules import (
    ANY_SEQUENCE,
    CHECKS,
    CheckSkipped,
    ConformanceError,
    run_check,
)
from kvtier_sdk.testing.conformance.subject import TierSubject


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one rule.

    Attributes:
        check: the check's name, or ``tier_state_machine``.
        rule: the rule in one line.
        result: ``passed``, ``failed`` or ``skipped``.
        why: the breach, or the reason for skipping the rule; empty if it passed.
    """

    check: str
    rule: str
    result: Literal["passed", "failed", "skipped"]
    why: str = ""


def run_kit(subject: TierSubject) -> Iterator[CheckResult]:
    """Check one rule after another, and yield the results. Call this where no event loop runs.

    ``subject`` is the tier under test. Without Hypothesis, the random sequences are skipped.
    """
    runs = [(one.name, one.rule, partial(run_check, one, subject)) for one in CHECKS.values()]
    runs.append(("tier_state_machine", ANY_SEQUENCE, partial(_run_sequences, subject)))
    for name, rule, run in runs:
        try:
            run()
        except CheckSkipped as reason:
            yield CheckResult(name, rule, "skipped", str(reason))
        except ConformanceError as error:
            yield CheckResult(name, rule, "failed", str(error).removeprefix(rule).strip())
        else:
            yield CheckResult(name, rule, "passed")


def _run_sequences(subject: TierSubject) -> None:
    try:
        from kvtier_sdk.testing.conformance.machine import run_sequences
    except ModuleNotFoundError as error:
        extra = f"{error.name} is missing: pip install 'kvtier-sdk[testing]'"
        raise CheckSkipped(extra) from error
    from hypothesis.configuration import set_hypothesis_home_dir

    with TemporaryDirectory() as directory:
        # By default, Hypothesis leaves files in the current directory.
        set_hypothesis_home_dir(directory)
        try:
            run_sequences(subject)
        finally:
            set_hypothesis_home_dir(None)
