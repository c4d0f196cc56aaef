"""A backend's own counters and gauges."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvtier_sdk.errors import TierContractError

T = TypeVar("T")


class TierCounter:
    """A counter that :meth:`TierContext.counter` makes. Any thread may add to it.

    ::

        context.counter("resends").add()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0.0

    def add(self, amount: float = 1) -> None:
        """Add an ``amount`` of 0 or more."""
        with self._lock:
            self._value += float(amount)

    def take(self) -> float:
        """Return the sum added since the last call."""
        with self._lock:
            taken, self._value = self._value, 0.0
        return taken


class TierGauge:
    """A gauge that :meth:`TierContext.gauge` makes. Any thread may set it.

    ::

        context.gauge("segments").set(12)
    """

    def __init__(self) -> None:
        self._value = 0.0

    @property
    def value(self) -> float:
        """The last value set; 0 at first."""
        return self._value

    def set(self, value: float) -> None:
        """Set the gauge to ``value``."""
        self._value = float(value)


class TierMetrics:
    def __init__(self) -> None:
        self.counters: dict[str, TierCounter] = {}
        self.gauges: dict[str, TierGauge] = {}
        self._told: dict[str, float] = {}
        self._is_complete = False

    def find(self, known: dict[str, T], name: str, make: Callable[[], T]) -> T:
        if name not in known:
            if name in self.counters or name in self.gauges:
                raise TierContractError(f"{name!r} cannot be both a counter and a gauge")
            if self._is_complete:
                raise TierContractError(
                    f"counter or gauge {name!r} comes too late: make it in __init__ or open"
                )
            known[name] = make()
        return known[name]

    def complete(self) -> bool:
        """Refuse new names after this call; return true if a counter or gauge exists."""
        self._is_complete = True
        return bool(self.counters or self.gauges)

    def take_changes(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return each counter's gain and each changed gauge's value since the last call."""
        gained = {name: counter.take() for name, counter in self.counters.items()}
        values = {name: gauge.value for name, gauge in self.gauges.items()}
        counters = {n: gain for n, gain in gained.items() if gain or n not in self._told}
        gauges = {n: value for n, value in values.items() if value != self._told.get(n)}
        self._told.update(counters | gauges)
        return counters, gauges
