"""The primary tier's slot table: the slot of each chunk, its state and its pins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.events import PRIMARY, EventLog
from kvtier_sdk.metrics import PoolUsage, TierStats
from kvtier_sdk.registry import build_facts
from kvtier_sdk.tiering.records import Slot, SlotState
from kvtier_sdk.types import Locality, Medium, OffloadKey, RequestContext

# Bound once, because this is the engine's thread.
_FREE: Final = SlotState.FREE
_WRITING: Final = SlotState.WRITING
_LOADING: Final = SlotState.LOADING
_READY: Final = SlotState.READY
_QUARANTINED: Final = SlotState.QUARANTINED


class Purge:
    """A purge of the primary tier at an operator's request.

    Attributes:
        left: chunks that were there when it began, and still are because they are in use. ``None``
            until it begins, with the engine's next step.
        forgotten: number of chunks that it has removed.
    """

    __slots__ = ("forgotten", "left")

    def __init__(self) -> None:
        self.left: list[OffloadKey] | None = None
        self.forgotten: int = 0


class PrimaryTier:
    """Slots, the chunks in them, and their eviction. Belongs to one thread.

    A slot is free only when it holds no chunk and has no pin. The manager advances ``step`` and
    ``now_s``, the number and the time of the engine's step.
    """

    def __init__(
        self, slot_count: int, chunk_bytes: int, policy: EvictionPolicy, *, events: bool = False
    ) -> None:
        self.slots = [Slot(index) for index in range(slot_count)]
        self.by_key: dict[OffloadKey, Slot] = {}
        self.chunk_bytes = chunk_bytes
        self.step = 0
        self.now_s = 0.0
        # Numbers of slots that the device, and a tier, are writing.
        self.writing = 0
        self.loading = 0
        self.stats = TierStats(PRIMARY, "primary", build_facts("primary"))
        self.stats.capacity_bytes = slot_count * chunk_bytes
        self._free = self.slots[::-1]
        self._policy = policy
        self.events = EventLog(PRIMARY, Medium.CPU, Locality.LOCAL, is_enabled=events)
        self._purges: list[Purge] = []

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def note_use(self) -> None:
        self.stats.used_chunks = len(self.slots) - len(self._free)
        self.stats.used_bytes = self.stats.used_chunks * self.chunk_bytes

    @property
    def pins(self) -> int:
        return sum(slot.pins for slot in self.slots)

    def take(self, count: int) -> tuple[list[Slot], Sequence[OffloadKey]]:
        """Take free slots, evicting chunks if there are too few; return the evicted ones too."""
        free = self._free
        evicted: Sequence[OffloadKey] = ()
        if count > len(free):
            evicted = self.victims(count - len(free), owed=False)
            self.evict(evicted)
        split = max(0, len(free) - count)
        taken = free[split:]
        del free[split:]
        taken.reverse()
        return taken, evicted

    def assign(self, keys: Sequence[OffloadKey], slots: Sequence[Slot], state: SlotState) -> None:
        """Assign taken slots to chunks about to be written; the writer has a pin on each."""
        self.by_key.update(zip(keys, slots, strict=True))
        self._count(state, len(slots))
        for key, slot in zip(keys, slots, strict=True):
            slot.key = key
            slot.state = state
            slot.pins = 1

    def publish(self, slots: Sequence[Slot], request: RequestContext) -> None:
        """Make written chunks readable, and evictable once they are unpinned.

        The writer's pins stay until they are released.
        """
        if not slots:
            return
        self._count(slots[0].state, -len(slots))
        insert, now_s = self._policy.on_insert, self.now_s
        # The last chunk first: a chunk is useless without its predecessors, so the start of the
        # prefix has to be evicted last.
        for slot in reversed(slots):
            slot.state = _READY
            slot.used_s = now_s
            insert(slot.key, slot.parent, slot.position, request)
        if self.events.is_enabled:
            self.events.add([slot.key for slot in slots], removed=False)

    def unpin(self, slot: Slot, count: int = 1) -> None:
        """Release pins; a slot without a chunk and without pins becomes free."""
        slot.pins -= count
        if not slot.pins and slot.state is _QUARANTINED:
            self._set_free(slot)

    def forget(self, slot: Slot) -> None:
        """Remove the chunk from its slot, which becomes free once it has no pin."""
        self._count(slot.state, -1)
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
        """Record uses of chunks; chunks that are not readable are ignored."""
        by_key, note, now_s = self.by_key, self._policy.on_access, self.now_s
        for key in reversed(keys):
            slot = by_key.get(key)
            if slot is not None and slot.state is _READY:
                slot.used_s = now_s
                note(key)

    def victims(self, count: int, *, owed: bool) -> Sequence[OffloadKey]:
        """Choose chunks to evict, with ``owed`` also chunks that are owed to a tier."""
        return self._policy.choose_victims(count, self._is_idle if owed else self._is_evictable)

    def evict(self, keys: Sequence[OffloadKey]) -> None:
        """Evict chunks that :meth:`victims` has just chosen."""
        if not keys:
            return
        # Chunks that are evicted together are about equally old: the first stands for all.
        age_s = self.now_s - self.by_key[keys[0]].used_s
        self.stats.evicted_age_s.observe_several(age_s, len(keys))
        pop, remove, free = self.by_key.pop, self._policy.on_remove, self._free
        for key in keys:
            slot = pop(key)
            remove(key)
            slot.state = _FREE
            slot.offers = None
            free.append(slot)
        self.stats.evicted_chunks += len(keys)
        self.events.add(keys, removed=True)

    def purge(self) -> Purge:
        """Forget all chunks that are here at the next step; any thread may call it."""
        purge = Purge()
        self._purges.append(purge)
        return purge

    def serve_purges(self) -> None:
        """Forget the chunks to purge that are not in use; the others follow in later steps."""
        for purge in list(self._purges):
            keys = list(self.by_key) if purge.left is None else purge.left
            there = [key for key in keys if key in self.by_key]
            idle = [key for key in there if self._is_idle(key)]
            for key in idle:
                self.forget(self.by_key[key])
            self.events.add(idle, removed=True)
            purge.forgotten += len(idle)
            purge.left = [key for key in there if key in self.by_key]
            if not purge.left:
                self._purges.remove(purge)

    def usage(self, held: Iterable[int]) -> PoolUsage:
        """Return how the slots are used; ``held`` are the slots of requests and of tiers."""
        count, free, known = len(self.slots), self.free_slots, len(self.by_key)
        writing, loading = self.writing, self.loading
        return PoolUsage(
            slots=count,
            free=free,
            ready=known - writing - loading,
            writing=writing,
            loading=loading,
            quarantined=count - free - known,
            pinned=sum(1 for index in held if self.slots[index].state is _READY),
        )

    def _is_idle(self, key: OffloadKey) -> bool:
        slot = self.by_key[key]
        return not slot.pins and slot.hit_step != self.step

    def _is_evictable(self, key: OffloadKey) -> bool:
        slot = self.by_key[key]
        if slot.pins or slot.hit_step == self.step:
            return False
        return slot.offers is None or not slot.offers.owed

    def _count(self, state: SlotState, slots: int) -> None:
        if state is _WRITING:
            self.writing += slots
        elif state is _LOADING:
            self.loading += slots

    def _set_free(self, slot: Slot) -> None:
        slot.state = _FREE
        self._free.append(slot)
