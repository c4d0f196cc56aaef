"""The primary tier: its slots, the chunks in the slots, and eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.events import PRIMARY, EventLog, OffloadingEvent
from kvtier_sdk.metrics import PoolUsage, TierStats
from kvtier_sdk.registry import build_facts
from kvtier_sdk.tiering.leases import Leases
from kvtier_sdk.tiering.records import Slot, SlotState
from kvtier_sdk.types import Locality, Medium, OffloadKey, RequestContext

_FREE: Final = SlotState.FREE
_WRITING: Final = SlotState.WRITING
_LOADING: Final = SlotState.LOADING
_READY: Final = SlotState.READY
_QUARANTINED: Final = SlotState.QUARANTINED


@dataclass(eq=False)
class Purge:
    """The progress of an operator's purge of the primary tier."""

    # The chunks left to remove. ``None`` means all chunks, before the purge's first step.
    left: Sequence[OffloadKey] | None
    forgotten: int = 0


class PrimaryTier:
    """The slots of the host pool and the chunks in them. Not thread-safe.

    A pin prevents the eviction and the reuse of a slot. A free slot has no chunk and no pin.
    """

    def __init__(
        self,
        slot_count: int,
        chunk_bytes: int,
        policy: EvictionPolicy,
        *,
        events: bool = False,
        announce: Callable[[OffloadingEvent], None] | None = None,
    ) -> None:
        self.slots = [Slot(index) for index in range(slot_count)]
        self.by_key: dict[OffloadKey, Slot] = {}
        self.chunk_bytes = chunk_bytes
        self.step = 0  # the number of the engine's current step, which the manager sets
        self.now_s = 0.0  # the time of this step, which the manager sets
        self.writing = 0  # slots in the state WRITING
        self.loading = 0  # slots in the state LOADING
        self.stats = TierStats(PRIMARY, "primary", build_facts("primary"))
        self.stats.capacity_bytes = slot_count * chunk_bytes
        self._free = self.slots[::-1]
        self._policy = policy
        self.leases = Leases()
        of = PRIMARY, Medium.CPU, Locality.LOCAL
        self.announce = announce
        self.events = EventLog(*of, is_enabled=events, announce=announce)
        # Routers may still list the chunks of this engine's earlier manager, so report a reset.
        self.events.reset()
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

    def note_of(self, key: OffloadKey) -> bytes:
        slot = self.by_key.get(key)
        return b"" if slot is None else slot.note

    def take(self, count: int) -> tuple[list[Slot], Sequence[OffloadKey]]:
        """Take up to ``count`` slots, evicting if needed; return the slots and the evicted keys."""
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
        self.by_key.update(zip(keys, slots, strict=True))
        self._count(state, len(slots))
        for key, slot in zip(keys, slots, strict=True):
            slot.key = key
            slot.note = b""
            slot.state = state
            slot.pins = 1

    def publish(self, slots: Sequence[Slot], request: RequestContext) -> None:
        """Make written chunks readable. The caller must still unpin the slots."""
        if not slots:
            return
        self._count(slots[0].state, -len(slots))
        now_s = self.now_s
        for slot in slots:
            slot.state = _READY
            slot.used_s = now_s
        keys = [slot.key for slot in slots]
        self._policy.on_insert(keys, request)
        notes = [] if self.announce is None else [slot.note for slot in slots]
        self.events.add(keys, removed=False, notes=notes, session=request.session)

    def unpin(self, slot: Slot, count: int = 1) -> None:
        """Release pins. A quarantined slot becomes free when its last pin is released."""
        slot.pins -= count
        if not slot.pins and slot.state is _QUARANTINED:
            self._set_free(slot)

    def forget(self, slot: Slot) -> None:
        """Remove a slot's chunk; the slot becomes free once all pins are released."""
        self._count(slot.state, -1)
        del self.by_key[slot.key]
        if slot.key in self.leases.held:
            self.leases.end([slot.key])
        if slot.state is _READY:
            self._policy.on_remove(slot.key)
        slot.offers = None
        slot.copies = 0
        if slot.pins:
            slot.state = _QUARANTINED
        else:
            self._set_free(slot)

    def access(self, keys: Iterable[OffloadKey], request: RequestContext) -> None:
        by_key, now_s = self.by_key, self.now_s
        ready = []
        for key in keys:
            slot = by_key.get(key)
            if slot is not None and slot.state is _READY:
                slot.used_s = now_s
                ready.append(key)
        if self.leases.held:
            self.leases.renew(ready, now_s)
        self._policy.on_access(ready, request)

    def victims(self, count: int, *, owed: bool) -> Sequence[OffloadKey]:
        may_leave = self._is_idle if owed else self._is_evictable
        held = self.leases.held
        if not held:
            return self._policy.choose_victims(count, may_leave)
        victims = list(
            self._policy.choose_victims(count, lambda key: key not in held and may_leave(key))
        )
        if len(victims) < count:
            retained = (key for key in self.leases.retained() if may_leave(key))
            victims += islice(retained, count - len(victims))
        return victims

    def evict(self, keys: Sequence[OffloadKey]) -> None:
        if not keys:
            return
        # Chunks evicted together are about equally old, so observe only the first chunk's age.
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
        if self.leases.held:
            self.leases.end(keys)
        self.events.add(keys, removed=True)

    def purge(self, keys: Sequence[OffloadKey] | None = None) -> Purge:
        """Remove ``keys`` at the next step; ``None`` means all chunks. Any thread may call this."""
        purge = Purge(keys)
        self._purges.append(purge)
        return purge

    def begin_step(self) -> None:
        if self.leases.held:
            self.leases.expire(self.now_s)
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
        """Count the slots by state. Requests or tiers use the slots with the indices ``held``."""
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
            leased=len(self.leases.held),
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
