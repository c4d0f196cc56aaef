"""Events that tell a request router which chunks a tier has stored or removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_sdk.types import Locality, Medium, OffloadKey


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A notice that a tier has stored chunks, or has removed them if ``removed`` is true.

    Attributes:
        keys: the keys of the chunks.
        tier: the tier's name; ``"host"`` for the primary tier.
        medium: the medium on which the tier keeps its chunks.
        locality: whether the tier keeps its chunks on the engine's machine or another machine.
    """

    keys: Sequence[OffloadKey]
    tier: str
    medium: Medium
    locality: Locality
    removed: bool


class EventLog:
    """A list of one tier's events since the last call of :meth:`take`."""

    def __init__(self, tier: str, medium: Medium, locality: Locality, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._tier, self._medium, self._locality = tier, medium, locality
        self._events: list[OffloadingEvent] = []

    def add(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if keys and self.is_enabled:
            self._events.append(
                OffloadingEvent(keys, self._tier, self._medium, self._locality, removed)
            )

    def take(self) -> list[OffloadingEvent]:
        taken, self._events = self._events, []
        return taken


#: The name of the primary tier in events and metrics.
PRIMARY = "host"
