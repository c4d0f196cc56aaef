"""The primary tier's slot table: which chunk is where, in what state, pinned by how many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    #: Holds no chunk any more, but somebody who has a pin may still read or write it.
    QUARANTINED = "quarantined"


# Looked up once: this is the engine's thread.
_FREE, _WRITING, _LOADING, _READY, _QUARANTINED = SlotState


class Slot:
    """One slot. A plain record: the table and the manager keep it consistent.

    Attributes:
        index: its place in the pool.
        key: the chunk in it, meaningless when free or quarantined.
        state: what it is doing.
        pins: references that forbid eviction and reuse: one for whoever writes it, one for each
            copy to the device and each store into a tier, one for each claim.
        hit_step: the step in which a lookup last answered ``HIT`` for it; until that step ends
            it is not evicted, so that ``prepare_load`` finds it.
        copies: copies to the device that are under way.
        promotion: what is known of the chunk's promotion, as long as it counts as one.
        offers: to which tiers the chunk was and will be offered, where that is kept track of.
        parent: the chunk before it in its prefix, where somebody wants to know it.
        position: its index in the prefix, likewise.
    """

    __slots__ = (
        "copies",
        "hit_step",
        "index",
        "key",
        "offers",
        "parent",
        "pins",
        "position",
        "promotion",
        "state",
    )

    if TYPE_CHECKING:
        promotion: Any
        offers: Any

    def __init__(self, index: int) -> None:
        self.index = index
        self.key: OffloadKey = b""
        self.state = _FREE
        self.pins = 0
        self.hit_step = -1
        self.copies = 0
        self.promotion = None
        self.offers = None
        self.parent: OffloadKey | None = None
        self.position = 0


class PrimaryTier:
    """Slots, the chunks in them, and which of them go when room is needed. One thread.

    A slot is free when it holds no chunk and nobody has a pin on it, and never before.

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
        free = self._free
        if count > len(free):
            self.evict(self.victims(count - len(free), owed=False))
        split = max(0, len(free) - count)
        taken = free[split:]
        del free[split:]
        taken.reverse()
        return taken

    def assign(self, keys: Sequence[OffloadKey], slots: Sequence[Slot], state: SlotState) -> None:
        """Give taken slots to chunks that are about to be written; the writer has a pin on each."""
        self.by_key.update(zip(keys, slots, strict=True))
        for key, slot in zip(keys, slots, strict=True):
            slot.key = key
            slot.state = state
            slot.pins = 1

    def publish(self, slots: Iterable[Slot], request: RequestContext) -> None:
        """Chunks have been written: from now on they are readable, and evictable once unpinned.

        The writer's pins stay until they are given back.

        Args:
            slots: of the chunks, in prefix order.
            request: who brought them.
        """
        insert = self._policy.on_insert
        # The last first: a chunk without those before it is worth nothing, so the start of the
        # prefix shall be the last to go.
        for slot in reversed(list(slots)):
            slot.state = _READY
            insert(slot.key, slot.parent, slot.position, request)

    def unpin(self, slot: Slot, count: int = 1) -> None:
        """Give pins back; a slot without a chunk and without pins is free."""
        slot.pins -= count
        if not slot.pins and slot.state is _QUARANTINED:
            self._set_free(slot)

    def forget(self, slot: Slot) -> None:
        """Take the chunk out of the slot, which is free as soon as nobody has a pin on it."""
        del self.by_key[slot.key]
        if slot.state is _READY:
            self._policy.on_remove(slot.key)
        slot.offers = None
        slot.copies = 0
        if slot.pins:
            slot.state = _QUARANTINED
        else:
            self._set_free(slot)

    def access(self, keys: Sequence[OffloadKey]) -> None:
        """Note uses of chunks, of those that are (still) readable.

        Args:
            keys: in prefix order, of which the first is the most recent use.
        """
        by_key, note = self.by_key, self._policy.on_access
        for key in reversed(keys):
            slot = by_key.get(key)
            if slot is not None and slot.state is _READY:
                note(key)

    def victims(self, count: int, *, owed: bool) -> Sequence[OffloadKey]:
        """Choose chunks to evict, without evicting them.

        Args:
            count: how many are wanted.
            owed: whether a chunk that a tier is still to get may be chosen.

        Returns:
            Up to ``count`` chunks, the least valuable first.
        """
        return self._policy.choose_victims(count, self._is_idle if owed else self._is_evictable)

    def evict(self, keys: Sequence[OffloadKey]) -> None:
        """Evict chunks that were chosen just now."""
        if not keys:
            return
        pop, remove, free = self.by_key.pop, self._policy.on_remove, self._free
        for key in keys:
            slot = pop(key)
            remove(key)
            slot.state = _FREE
            slot.offers = None
            free.append(slot)
        self._on_evicted(keys)

    def _is_idle(self, key: OffloadKey) -> bool:
        slot = self.by_key[key]
        return not slot.pins and slot.hit_step != self.step

    def _is_evictable(self, key: OffloadKey) -> bool:
        slot = self.by_key[key]
        if slot.pins or slot.hit_step == self.step:
            return False
        return slot.offers is None or not slot.offers.owed

    def _set_free(self, slot: Slot) -> None:
        slot.state = _FREE
        self._free.append(slot)
