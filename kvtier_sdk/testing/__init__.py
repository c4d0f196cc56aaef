"""Tools for testing tiers and managers: a conformance kit, faults, a proxy, a virtual clock.

:class:`TierConformance` and :func:`tier_state_machine` need pytest and hypothesis, and are imported
when they are first used. All other names work without these packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier_sdk.testing.conformance.probe import Probe as Probe
from kvtier_sdk.testing.conformance.results import CheckResult as CheckResult
from kvtier_sdk.testing.conformance.results import run_kit as run_kit
from kvtier_sdk.testing.conformance.rules import CHECKS as CHECKS
from kvtier_sdk.testing.conformance.rules import Check as Check
from kvtier_sdk.testing.conformance.rules import CheckSkipped as CheckSkipped
from kvtier_sdk.testing.conformance.rules import ConformanceError as ConformanceError
from kvtier_sdk.testing.conformance.rules import Hook as Hook
from kvtier_sdk.testing.conformance.subject import TierLike as TierLike
from kvtier_sdk.testing.conformance.subject import TierSubject as TierSubject
from kvtier_sdk.testing.faulty import Fault as Fault
from kvtier_sdk.testing.faulty import FaultKind as FaultKind
from kvtier_sdk.testing.faulty import FaultPlan as FaultPlan
from kvtier_sdk.testing.faulty import FaultyTier as FaultyTier
from kvtier_sdk.testing.faulty import faulty as faulty
from kvtier_sdk.testing.proxy import TcpProxy as TcpProxy
from kvtier_sdk.testing.virtual_clock import VirtualClock as VirtualClock

if TYPE_CHECKING:
    from kvtier_sdk.testing.conformance.machine import tier_state_machine as tier_state_machine
    from kvtier_sdk.testing.conformance.suite import TierConformance as TierConformance

# Maps each name that needs the extra ``testing`` to the module that defines it.
_NEEDS_EXTRA = {
    "TierConformance": "kvtier_sdk.testing.conformance.suite",
    "tier_state_machine": "kvtier_sdk.testing.conformance.machine",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_NEEDS_EXTRA[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs {error.name}: pip install 'kvtier-sdk[testing]'",
            name=error.name,
        ) from error
