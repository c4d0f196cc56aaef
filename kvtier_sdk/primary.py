"""The primary tier's slot table: which chunk is where, in what state, pinned by how many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.types import OffloadKey, RequestContext


class SlotState(Enum):
    """What a slot is doing."""

    FREE = "free"
    #: The device is writing it (a store that is not complete).
    WRITING = "writing"
    #: A tier is writing it (a promotion).
    LOADING = "loading"
    #: Holds a readable chunk; evictable unless pinned.
    READY = "ready"
    #: Holds nothing, but a tier whose job has failed may still write it.
    QUARANTINED = "quarantined"


FREE, READY = SlotState.FREE, SlotState.READY


class Slot:
    """One slot. A plain record: the table and the manager keep it consistent.

    Attributes:
        index: its place in the pool.
        key: the chunk in it, meaningless when free or quarantined.
        state: what it is doing.
        pins: references that forbid eviction.
        hit_step: the step in which a lookup last answered ``HIT`` for it; until that step ends
            it is not evicted, so that ``prepare_load`` finds it.
        promotion: of a loading slot, what the manager knows of the load.
        source: of a promoted chunk, the index of the tier it came from; -1 otherwise.
        holds: pins that belong to requests for which the chunk was promoted.
        parent: the chunk before it in its prefix, where the policy wants it.
        position: its index in the prefix, where the policy wants it.
    """

    __slots__ = (
        "hit_step",
        "holds",
        "index",
        "key",
        "parent",
        "pins",
        "position",
        "promotion",
        "source",
        "state",
    )

    if TYPE_CHECKING:
        promotion: Any

    def __init__(self, index: int) -> None:
        self.index = index
        self.key: OffloadKey = b""
        self.state = FREE
        self.pins = 0
        self.hit_step = -1
        self.promotion = None
        self.source = -1
        self.holds = 0
        self.parent: OffloadKey | None = None
        self.position = 0


class PrimaryTier:
    """Slots, the chunks in them, and which of them go when room is needed. One thread.

    Attributes:
        slots: every slot, by index.
        by_key: the slot of each chunk that is readable or being written.
        step: the manager's step counter; it moves this on.

    Args:
        slot_count: how many slots the pool has.
        policy: chooses the victims.
        on_evicted: told of the keys of each eviction.
    """

    def __init__(
        self,
        slot_count: int,
        policy: EvictionPolicy,
        on_evicted: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        self.slots = [Slot(index) for index in range(slot_count)]
        self.by_key: dict[OffloadKey, Slot] = {}
        self.step = 0
        self._free = self.slots[::-1]
        self._policy = policy
        self._on_evicted = on_evicted

    @property
    def free_slots(self) -> int:
        """Slots that can be taken without an eviction."""
        return len(self._free)

    @property
    def pins(self) -> int:
        """Pins on all slots together."""
        return sum(slot.pins for slot in self.slots)

    def take(self, count: int) -> list[Slot]:
        """Take slots out of the free ones, evicting where these are too few.

        Args:
            count: how many are wanted.

        Returns:
            Up to ``count`` free slots, fewer where everything else is pinned or in flight.
        """
        shortage = count - len(self._free)
        if shortage > 0:
            self._evict(shortage)
        split = max(0, len(self._free) - count)
        taken = self._free[split:]
        del self._free[split:]
        taken.reverse()
        return taken

    def assign(self, slot: Slot, key: OffloadKey, state: SlotState) -> None:
        """Give a taken slot to a chunk that is about to be written."""
        slot.key = key
        slot.state = state
        self.by_key[key] = slot

    def publish(self, slot: Slot, request: RequestContext) -> None:
        """The chunk has been written: from now on it is readable, and evictable once unpinned."""
        slot.state = READY
        self._policy.on_insert(slot.key, slot.parent, slot.position, request)

    def forget(self, slot: Slot) -> None:
        """The chunk was not written: its key is free again, its slot is not yet."""
        del self.by_key[slot.key]
        slot.state = SlotState.QUARANTINED

    def give_back(self, slot: Slot) -> None:
        """Nobody writes the slot any more: it is free."""
        slot.state = FREE
        slot.key = b""
        slot.promotion = None
        slot.source = -1
        self._free.append(slot)

    def access(self, key: OffloadKey) -> None:
        """Note a use of a chunk, if it is (still) readable."""
        slot = self.by_key.get(key)
        if slot is not None and slot.state is READY:
            self._policy.on_access(key)

    def _evict(self, count: int) -> None:
        victims = self._policy.choose_victims(count, self._is_evictable)
        for key in victims:
            self._policy.on_remove(key)
            self.give_back(self.by_key.pop(key))
        if victims:
            self._on_evicted(victims)

    def _is_evictable(self, key: OffloadKey) -> bool:
        slot = self.by_key[key]
        return slot.pins == 0 and slot.hit_step != self.step
