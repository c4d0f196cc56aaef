"""Tools for testing tiers and managers: a virtual clock and a runner that is stepped by hand."""

from kvtier_sdk.testing.inline_runner import InlineRunner
from kvtier_sdk.testing.virtual_clock import VirtualClock

__all__ = ["InlineRunner", "VirtualClock"]
