"""Checks the manager's tables against records that are independent of the manager."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier_sdk.core_form import IS_COMPILED
from kvtier_sdk.events import PRIMARY, OffloadingEvent
from kvtier_sdk.runner.breaker import Direction
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.tiering.records import Slot, SlotState
from kvtier_sdk.types import OffloadKey
from support.simulation.breach import short
from support.simulation.ledger import Ledger, Transfer

if TYPE_CHECKING:
    from support.simulation.world import World

_FREE, _WRITING, _LOADING, _READY, _QUARANTINED = SlotState


@dataclass(slots=True)
class _SlotUse:
    pins: int = 0
    writers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)

    def add(self, who: str, *, writes: bool) -> None:
        self.pins += 1
        (self.writers if writes else self.readers).append(who)


class Rules:
    def __init__(self, world: World) -> None:
        self._manager = world.manager
        self._inside = world.inside
        self._device = world.device
        self._ledgers = world.ledgers
        self._tiers = world.tiers
        self._policy = world.policy
        self._choosy = world.engine.choosy
        self._engine = world.engine
        self._record = world.record
        slots = world.plan.slots
        self._promotion_limit = slots - round(slots * world.plan.store_reserve)
        self._breach = world.breach
        # The number of promotions and the leased chunks, both after the last step.
        self._busy = 0
        self._leased: list[tuple[OffloadKey, object]] = []
        # The chunks of the primary tier according to the manager's events.
        self._announced: set[OffloadKey] = set()
        # The chunks of each secondary tier according to the manager's events.
        self._announced_below: dict[str, set[OffloadKey]] = defaultdict(set)
        # The number of stores that resets withdrew from each tier.
        self._withdrawn: Counter[int] = Counter()
        self._offered_again = self._inside.count_offers_again()

    def before_reset(self) -> None:
        """Count the stores that are not submitted yet. A reset withdraws them."""
        for tier in self._inside.tiers:
            for item in self._inside.collected(tier):
                self._withdrawn[tier.index] += item.operation is Operation.STORE

    def check(self) -> None:
        uses = self._uses()
        self._check_table()
        for slot, use in zip(self._inside.primary.slots, uses, strict=True):
            self._check_slot(slot, use)
        self._check_promotions()
        self._check_jobs()
        self._check_breakers()
        self._check_lookups()
        self._check_stores()
        self._check_offers()
        self._check_usage()
        self._check_events(self._manager.take_events())
        self._record.check()

    def check_idle(self) -> None:
        """Check the rules that hold when the manager reports that no work is pending."""
        inside = self._inside
        waiting = [item for tier in inside.tiers for item in inside.collected(tier)]
        jobs = [ledger.describe() for ledger in self._ledgers if ledger.pending]
        if waiting or jobs:
            self._breach("pending work is told", f"none, says the manager: {waiting} {jobs}")

    def check_rest(self) -> None:
        inside = self._inside
        left = {
            "pins": inside.primary.pins,
            "requests": inside.requests,
            "requests that the policy takes for running": sorted(self._policy.unfinished),
            "lookups": len(inside.open_lookups) + len(inside.new_lookups),
            "chunks looked up": inside.chunks_looked_up,
            "promotions": inside.promotions,
            "offers": [slot.index for slot in inside.offered()],
            "removals": [n for tier in inside.tiers if (n := len(tier.client.jobs._gone))],
            "stale copies": len(inside.stale_copies),
            "jobs": [ledger.describe() for ledger in self._ledgers if ledger.held],
            "work": self._manager.has_pending_work(),
            "slots": [
                slot.index for slot in inside.primary.slots if slot.state not in (_FREE, _READY)
            ],
        }
        self._check_events(self._manager.take_events())
        for ledger, tier in zip(self._ledgers, self._tiers, strict=True):
            gone = [short(k) for k in self._announced_below[ledger.name] if not tier.holds(k)]
            if gone:
                self._breach("what is announced is there", f"{ledger.name} has no {gone}")
        remains = {what: value for what, value in left.items() if value}
        if remains:
            self._breach("at rest nothing is left", str(remains))

    def _pairs(self) -> Iterator[tuple[ManagedTier, Ledger]]:
        return zip(self._inside.tiers, self._ledgers, strict=True)

    # --- slots --------------------------------------------------------------------------------

    def _transfers(self) -> Iterator[Transfer]:
        for ledger in self._ledgers:
            yield from ledger.transfers()
        for tier in self._inside.tiers:
            yield from self._inside.collected(tier)

    def _uses(self) -> list[_SlotUse]:
        uses = [_SlotUse() for _ in self._inside.primary.slots]
        for transfer in self._transfers():
            use = uses[transfer.slot]
            if transfer.moves:
                who = f"{transfer.operation.value} of {short(transfer.key)}"
                use.add(who, writes=transfer.operation is Operation.LOAD)
            else:
                use.pins += 1
        for copy in self._device.all:
            uses[copy.slot].add(f"copy of {short(copy.key)}", writes=copy.writes)
        for _, _, slot in self._inside.claims():
            uses[slot.index].pins += 1
        return uses

    def _check_table(self) -> None:
        primary, free = self._inside.primary, self._inside.free
        if len({slot.index for slot in free}) != len(free):
            self._breach("a slot has one owner", "one is twice among the free ones")
        if {slot.index for slot in free} != {s.index for s in primary.slots if s.state is _FREE}:
            self._breach("a slot has one owner", "the free ones are not those that are listed")
        for key, slot in primary.by_key.items():
            if slot.key != key or slot.state not in (_READY, _WRITING, _LOADING):
                self._breach(
                    "a slot has one owner",
                    f"slot {slot.index} is {slot.state.value} with {short(slot.key)} and listed "
                    f"under {short(key)}",
                )
        held = sum(slot.state in (_READY, _WRITING, _LOADING) for slot in primary.slots)
        if held != len(primary.by_key):
            self._breach("a slot has one owner", "a chunk lies in two slots")

    def _check_slot(self, slot: Slot, use: _SlotUse) -> None:
        where = f"slot {slot.index}, {slot.state.value}"
        if slot.pins != use.pins:
            self._breach(
                "each pin has its owner",
                f"{where}: {slot.pins} pins, and {use.pins} owners: "
                f"{use.writers + use.readers}, claims",
            )
        if len(use.writers) > 1 or (use.writers and use.readers):
            self._breach(
                "nobody else uses a slot that is written", f"{where}: {use.writers + use.readers}"
            )
        if slot.state is _FREE and use.pins:
            self._breach("no slot is free and in use", f"{where}: {use.writers + use.readers}")
        if slot.state is _QUARANTINED and not use.pins:
            self._breach("no slot is lost", where)
        if slot.state is _READY:
            if use.writers:
                self._breach("a readable slot is not written", f"{where}: {use.writers}")
            if not self._device.holds(slot.index, slot.key):
                self._breach("a readable slot holds its chunk", f"{where} with {short(slot.key)}")
        elif slot.state in (_WRITING, _LOADING) and len(use.writers) != 1:
            self._breach("what is awaited is on its way", f"{where}: {short(slot.key)} is not")

    def _check_promotions(self) -> None:
        loads = [t for t in self._transfers() if t.operation is Operation.LOAD]
        busy = {transfer.slot for transfer in loads if transfer.moves}
        for request_id, key, slot in self._inside.claims():
            if slot.key != key or slot.state not in (_LOADING, _READY):
                self._breach("a claim is on a chunk", f"{request_id} claims slot {slot.index}")
            busy.add(slot.index)
        if len(busy) > self._promotion_limit:
            self._breach(
                "promotions leave room to stores",
                f"they hold {len(busy)} slots of {self._promotion_limit}",
            )
        leases = self._inside.primary.leases.held
        kept = sum(leases.get(key) is lease for key, lease in self._leased)
        if len(busy) > self._busy and len(busy) + kept > self._promotion_limit:
            self._breach(
                "promotions leave room to stores",
                f"they hold {len(busy)} slots of {self._promotion_limit} beside {kept} leases",
            )
        self._busy, self._leased = len(busy), list(leases.items())
        # The manager may count an arrived chunk as loading until the whole job has ended.
        arrived = {transfer.slot for transfer in loads}
        if not len(busy) <= self._inside.promotions <= len(busy | arrived):
            self._breach(
                "promotions are counted", f"{self._inside.promotions}, and there are {len(busy)}"
            )

    # --- jobs, lookups, figures ----------------------------------------------------------------

    def _check_jobs(self) -> None:
        inside = self._inside
        for tier, ledger in self._pairs():
            client = tier.client
            running, quarantined = inside.running(tier), inside.quarantined(tier)
            if running.keys() != ledger.pending.keys():
                self._breach("the manager knows its jobs", f"{client.spec.name}: {list(running)}")
            if running.keys() | quarantined.keys() != ledger.held.keys():
                self._breach(
                    "the manager knows its jobs", f"{client.spec.name}: {ledger.describe()}"
                )
            for job in ledger.pending.values():
                reads = job.operation in (Operation.LOOKUP, Operation.LOAD)
                may_ask = self._choosy.get(job.request.request_id)
                if reads and may_ask is not None and ledger.name not in may_ask:
                    self._breach(
                        "a request asks its own tiers alone",
                        f"{job.operation.value} {job.job_id} of {ledger.name} is for "
                        f"{job.request.request_id}",
                    )
            if min(client.store_room, client.load_room) < 0:
                self._breach("queues are bounded", client.spec.name)
            for operation, counted_bytes in (
                (Operation.LOAD, client.load_bytes),
                (Operation.STORE, client.store_bytes),
            ):
                chunks = sum(
                    len(job.keys) for job in ledger.pending.values() if job.operation is operation
                ) + sum(item.operation is operation for item in inside.collected(tier))
                if counted_bytes != chunks * inside.chunk_bytes:
                    self._breach(
                        "queues are counted",
                        f"{client.spec.name}: {counted_bytes} bytes of {chunks} {operation.value}s",
                    )
                if counted_bytes > max(client.spec.runner.max_queue_bytes, inside.chunk_bytes):
                    self._breach("queues are bounded", f"{client.spec.name}: {counted_bytes} bytes")

    def _check_breakers(self) -> None:
        for tier, ledger in self._pairs():
            stats = tier.client.stats
            for direction, tries, is_open in (
                (Direction.READ, tier.client.takes_reads, stats.reads_open),
                (Direction.WRITE, tier.client.takes_stores, stats.stores_open),
            ):
                refuses = direction in ledger.refuses
                if bool(is_open) != refuses or (tries and refuses):
                    self._breach(
                        "a breaker's state is mirrored", f"{ledger.name}: {direction.value}"
                    )

    def _check_stores(self) -> None:
        """Check that the counters explain each chunk that a write-through tier did not get."""
        if IS_COMPILED:
            return
        inside = self._inside
        expected = self._manager.stats[0].stored_chunks
        for tier, ledger in self._pairs():
            client = tier.client
            if tier.whole_requests or client.spec.runner.store_policy != "through":
                continue
            waiting = sum(item.operation is Operation.STORE for item in inside.collected(tier))
            dropped = sum(
                n for what, n in client.stats.dropped.items() if what.startswith("store.")
            )
            dropped += client.stats.not_admitted_chunks
            accounted = ledger.given + waiting + dropped + self._withdrawn[tier.index]
            offered = expected + self._offered_again[tier] - self._engine.kept_back
            if accounted != offered:
                self._breach(
                    "what is dropped is counted",
                    f"{ledger.name}: {offered} chunks were offered, {accounted} accounted for",
                )

    def _check_offers(self) -> None:
        """Check that each chunk offered to a tier is in the tier or on its way."""
        inside = self._inside
        for tier, ledger in self._pairs():
            under_way = {t.key for t in ledger.transfers()} | {
                t.key for t in inside.collected(tier)
            }
            there = ledger.arrived | ledger.known | under_way
            for key in inside.sent(tier):
                if not (key in there or ledger.found[key]):
                    self._breach(
                        "what a tier is not offered it has", f"{ledger.name} never got {short(key)}"
                    )

    def _check_lookups(self) -> None:
        inside = self._inside
        answering: dict[int, int] = {}
        for tier, ledger in self._pairs():
            for job in ledger.pending.values():
                if job.operation is Operation.LOOKUP:
                    answering[id(job.tag)] = answering.get(id(job.tag), 0) | tier.bit
                    if list(job.tag.keys) != list(job.keys):
                        self._breach("an answer belongs to its lookup", f"job {job.job_id}")
        for key, pending in inside.open_lookups.items():
            if pending.sealed and pending.waiting != answering.get(id(pending), 0):
                self._breach(
                    "an answer belongs to its lookup",
                    f"{short(key)} waits for tiers {pending.waiting:b}, and "
                    f"{answering.get(id(pending), 0):b} are to answer",
                )

    def _check_usage(self) -> None:
        usage = self._manager.usage()
        parts = usage.free + usage.ready + usage.writing + usage.loading + usage.quarantined
        states = Counter(slot.state for slot in self._inside.primary.slots)
        pinned = sum(slot.pins > 0 for slot in self._inside.primary.slots if slot.state is _READY)
        counted = states[_FREE], states[_READY], states[_LOADING], pinned
        if (
            parts != usage.slots
            or (usage.free, usage.ready, usage.loading, usage.pinned) != counted
        ):
            self._breach("the pool's figures add up", str(usage))

    # --- events -------------------------------------------------------------------------------

    def _check_events(self, events: Sequence[OffloadingEvent]) -> None:
        for event in events:
            if event.tier == PRIMARY:
                self._hear(event)
            elif event.removed:
                self._announced_below[event.tier].difference_update(event.keys)
            else:
                self._announced_below[event.tier].update(event.keys)
        readable = {s.key for s in self._inside.primary.slots if s.state is _READY}
        if self._announced != readable:
            differing = [short(key) for key in sorted(self._announced ^ readable)]
            self._breach("events agree with the primary tier", str(differing))
        if self._policy.known != readable:
            differing = [short(key) for key in sorted(self._policy.known ^ readable)]
            self._breach("the policy knows exactly the readable chunks", str(differing))
        for ledger in self._ledgers:
            for removed, expected in ((False, ledger.stored), (True, ledger.removed)):
                said = [
                    key
                    for event in events
                    if event.tier == ledger.name and event.removed is removed
                    for key in event.keys
                ]
                if Counter(said) != Counter(expected):
                    self._breach(
                        "events agree with the tiers",
                        f"{ledger.name}: {len(said)} chunks, {len(expected)} expected",
                    )
                expected.clear()

    def _hear(self, event: OffloadingEvent) -> None:
        keys = set(event.keys)
        if len(keys) != len(event.keys):
            self._breach("events agree with the primary tier", "a chunk is named twice")
        if event.removed != (keys <= self._announced) or (
            not event.removed and keys & self._announced
        ):
            what = "removed" if event.removed else "stored"
            self._breach("events agree with the primary tier", f"{what} {sorted(map(short, keys))}")
        if event.removed:
            self._announced -= keys
        else:
            self._announced |= keys
