"""Copies between the host pool and the device, which pin the slots that they read or write."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier_sdk.tiering.records import RequestState, Slot
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey


class DeviceCopies:
    """Pins slots for the copies of requests."""

    def __init__(self, primary: PrimaryTier) -> None:
        self._primary = primary
        # Slots that copies from before a reset may still touch.
        self._stale: list[Slot] = []

    def begin(self, keys: Sequence[OffloadKey], slots: Sequence[Slot], state: RequestState) -> None:
        """Pin the slot of each chunk that is copied to the device."""
        copies = state.copies
        for key, slot in zip(keys, slots, strict=True):
            slot.pins += 1
            slot.copies += 1
            if key in copies:
                copies[key].append(slot)
            else:
                copies[key] = [slot]

    def end(self, keys: Collection[OffloadKey], state: RequestState) -> int:
        """Release the pins of ended copies; return the number of copies."""
        copies = state.copies
        ended = 0
        for key in keys:
            slots = copies.get(key)
            if slots is None:
                continue
            slot = slots.pop()
            if not slots:
                del copies[key]
            slot.copies -= 1
            self._primary.unpin(slot)
            ended += 1
        return ended

    def disown(self, state: RequestState) -> None:
        """Have a request start over; keep the slots of its copies until :meth:`flushed`."""
        self._stale += state.start_over()

    def flushed(self) -> None:
        """Free the slots of disowned copies: the copies have ended."""
        stale, self._stale = self._stale, []
        for slot in stale:
            self._primary.unpin(slot)
