"""A request's wait: its chunks are not looked up again before an answer that it awaits changes."""

from __future__ import annotations

from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.slots import Slot, SlotState
from kvtier_sdk.types import OffloadKey


class Wait:
    """The pending answers that a request got in one step, and what has to change for others.

    Attributes:
        step: the step.
        latest: the lookup that was noted last.
        prefix: the first and the last chunk of the prefix that was looked up as a whole.
        hits: the number of its chunks from the start that were there or on their way.
        put_off: a chunk that is looked up when fewer others are.
    """

    __slots__ = (
        "_key",
        "_lookups",
        "_slot",
        "_state",
        "hits",
        "latest",
        "prefix",
        "put_off",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.latest: PendingLookup | None = None
        self.prefix: tuple[OffloadKey, OffloadKey] | None = None
        self.hits = 0
        self.put_off: OffloadKey | None = None
        self._lookups: list[tuple[PendingLookup, int]] = []
        self._slot: Slot | None = None
        self._key: OffloadKey = b""
        self._state = SlotState.FREE

    def note_lookup(self, pending: PendingLookup) -> None:
        """Note a lookup that tiers are still to answer."""
        self.latest = pending
        self._lookups.append((pending, pending.waiting))

    def note_slot(self, slot: Slot) -> None:
        """Note a chunk on its way. The first one has to arrive before the request can go on."""
        if self._slot is None:
            self._slot, self._key, self._state = slot, slot.key, slot.state

    def is_over(self, now_s: float) -> bool:
        """Return true if a tier has answered, a deadline has passed, or the first chunk is there.

        Args:
            now_s: the time.
        """
        slot = self._slot
        if slot is not None and (slot.state is not self._state or slot.key != self._key):
            return True
        for pending, waiting in self._lookups:
            if pending.waiting != waiting or now_s > pending.deadline_s:
                return True
        return False
