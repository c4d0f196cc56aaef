"""Tools for testing tiers and managers: a conformance kit, faults, a proxy, a virtual clock.

:class:`TierConformance` and :func:`tier_state_machine` need pytest and hypothesis, and are imported
when they are first used. All other names work without these packages.
"""

from typing import TYPE_CHECKING, Any

from kvtier_sdk.testing.conformance.probe import Probe
from kvtier_sdk.testing.conformance.results import CheckResult, run_kit
from kvtier_sdk.testing.conformance.rules import CHECKS, Check, CheckSkipped, ConformanceError, Hook
from kvtier_sdk.testing.conformance.subject import TierLike, TierSubject
from kvtier_sdk.testing.faulty import Fault, FaultKind, FaultPlan, FaultyTier, faulty
from kvtier_sdk.testing.proxy import TcpProxy
from kvtier_sdk.testing.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from kvtier_sdk.testing.conformance.machine import tier_state_machine
    from kvtier_sdk.testing.conformance.suite import TierConformance

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "CheckSkipped",
    "ConformanceError",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyTier",
    "Hook",
    "Probe",
    "TcpProxy",
    "TierConformance",
    "TierLike",
    "TierSubject",
    "VirtualClock",
    "faulty",
    "run_kit",
    "tier_state_machine",
]

# Maps each name that needs the extra ``testing`` to the module that defines it.
_NEEDS_EXTRA = {
    "TierConformance": "kvtier_sdk.testing.conformance.suite",
    "tier_state_machine": "kvtier_sdk.testing.conformance.machine",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_NEEDS_EXTRA[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs {error.name}: pip install 'kvtier-sdk[testing]'",
            name=error.name,
        ) from error
