"""A tier that evicts chunks before they are read gets only chunks that were seen before."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import pytest
from support.engine import KEYS, A, B, Engine, Make

from kvtier_sdk import OffloadKey, RunnerOptions, TierStats, Usage, make_offload_key
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.testing import VirtualClock
from kvtier_sdk.tiering.admission import Admission
from kvtier_sdk.tiering.records import Slot

EVICTS, TAKEN, REFUSED = "evicts", "taken", "refused"


def key_of(number: int) -> OffloadKey:
    return make_offload_key(random.Random(number).randbytes(32))


def slot_of(number: int) -> Slot:
    return Slot(0, key_of(number))


class Rig:
    def __init__(self, capacity: int, *, enabled: bool = True) -> None:
        self.stats = TierStats("t", "memory")
        self.options = RunnerOptions(admission="auto" if enabled else "off")
        self.admission = Admission(self.stats, TierLog("t", VirtualClock()), self.options)
        self.capacity = capacity
        # The rig evicts by chunk count, so any number will do. ``None`` would mean no report yet.
        self.stats.used_bytes = 0
        self.cache: OrderedDict[OffloadKey, None] = OrderedDict()
        self.hits = self.writes = self.unread = 0
        self.was_read: set[OffloadKey] = set()

    def play(self, numbers: Iterator[int]) -> None:
        for slot in map(slot_of, numbers):
            key = slot.key
            if key in self.cache:
                self.hits += 1
                self.cache.move_to_end(key)
                self.was_read.add(key)
                self.admission.read(key)
                self.admission.used([slot], [True])
            elif self.admission.choose([slot])[0]:
                self.writes += 1
                self.admission.sent([key])
                self.cache[key] = None
                if len(self.cache) > self.capacity:
                    victim, _ = self.cache.popitem(last=False)
                    self.unread += victim not in self.was_read
                    self.was_read.discard(victim)
                    self.admission.removed([victim], evicted=True)

    def takes(self, number: int) -> bool:
        return bool(self.admission.choose([slot_of(number)])[0])


def popular_and_passing(count: int, popular: int, seed: int = 0) -> Iterator[int]:
    """Yield popular chunks with probability 1/3, and otherwise chunks that never return."""
    rng = random.Random(seed)
    for number in range(count):
        yield rng.randrange(popular) if rng.random() < 1 / 3 else popular + number


def played(workload: Callable[[], Iterator[int]], capacity: int) -> tuple[Rig, Rig]:
    rigs = Rig(capacity), Rig(capacity, enabled=False)
    for rig in rigs:
        rig.play(workload())
    return rigs


@pytest.mark.parametrize("capacity", [50, 500])
def test_far_below_the_working_set_there_are_more_hits_for_fewer_writes(capacity: int) -> None:
    chosen, all_of_them = played(
        lambda: popular_and_passing(60 * capacity, popular=2 * capacity), capacity
    )
    assert chosen.hits > 1.2 * all_of_them.hits
    assert chosen.writes < 0.5 * all_of_them.writes
    assert chosen.stats.not_admitted_chunks > 0
    assert all_of_them.stats.not_admitted_chunks == 0


def test_where_the_working_set_fits_nothing_is_refused() -> None:
    chosen, all_of_them = played(lambda: iter([*range(500)] * 3), 500)
    assert (chosen.hits, chosen.writes) == (all_of_them.hits, all_of_them.writes) == (1000, 500)
    assert chosen.stats.not_admitted_chunks == 0


def test_chunks_that_are_read_once_soon_after_their_store_are_still_stored() -> None:
    def twice() -> Iterator[int]:
        for start in range(0, 20_000, 100):
            yield from [*range(start, start + 100)] * 2

    chosen, all_of_them = played(twice, 300)
    assert chosen.hits == all_of_them.hits == 20_000
    assert chosen.stats.evicted_unread_chunks == 0


def test_chunks_evicted_unread_are_counted() -> None:
    rig = Rig(100, enabled=False)
    rig.play(popular_and_passing(5000, popular=50))
    assert rig.stats.evicted_unread_chunks == rig.unread > 2000


def test_in_a_large_tier_they_are_estimated_from_a_sample() -> None:
    rig = Rig(5000, enabled=False)
    rig.play(popular_and_passing(30_000, popular=2500))
    assert rig.stats.evicted_unread_chunks == pytest.approx(rig.unread, rel=0.1)
    assert len(rig.admission._was_read) <= 1024


def limit(engine: Engine, chunks: int) -> None:
    tier = engine.tiers[0]
    capacity = {"capacity_bytes": chunks * tier.context.object_bytes}
    tier.config = tier.config.model_copy(update=capacity)


def store_each(engine: Engine, keys: Iterable[OffloadKey], steps: int = 1) -> None:
    for key in keys:
        engine.store(A, key)
        for _ in range(steps):
            engine.step()


def thrashed(make: Make, **options: object) -> Engine:
    """Return an engine whose tier of 8 chunks has stored many more chunks than fit."""
    engine = make(slots=4, **options)
    limit(engine, 8)
    for first in range(4, 324, 8):
        store_each(engine, (*KEYS[:4], *KEYS[first : first + 8]))
    engine.step()
    return engine


def test_a_refused_chunk_is_offered_again_when_it_is_used(make: Make) -> None:
    engine = thrashed(make)
    engine.store(A, KEYS[500])
    engine.step()
    assert KEYS[500] not in engine.tiers[0]._objects
    assert engine.settle(B, KEYS[500]) == ["HIT"]
    engine.load(B, KEYS[500])
    engine.step()
    assert KEYS[500] in engine.tiers[0]._objects
    engine.at_rest()


def test_a_chunk_that_is_computed_again_is_stored(make: Make) -> None:
    engine = thrashed(make)
    store_each(engine, (KEYS[500], *KEYS[600:610], KEYS[500]))
    assert KEYS[500] in engine.tiers[0]._objects
    assert not set(KEYS[600:610]) & set(engine.tiers[0]._objects)
    engine.at_rest()


def test_a_spilling_tier_is_owed_only_what_was_seen_before(make: Make) -> None:
    engine = thrashed(make, store_policy="on_evict")
    refused = engine.manager.stats[1].not_admitted_chunks
    store_each(engine, KEYS[500:520], steps=2)
    assert engine.manager.stats[1].not_admitted_chunks >= refused + 20
    assert engine.settle(B, KEYS[519]) == ["HIT"]
    engine.load(B, KEYS[519])
    store_each(engine, KEYS[520:530], steps=2)
    assert KEYS[519] in engine.tiers[0]._objects
    engine.at_rest()


@pytest.mark.parametrize(
    "options",
    [{"admission": "off"}, {"offload_policy": "request"}],
    ids=lambda options: next(iter(options)),
)
def test_it_is_off_for_tiers_of_whole_requests(make: Make, options: dict[str, str]) -> None:
    engine = thrashed(make, **options)
    engine.at_rest()
    assert engine.manager.stats[1].stored_chunks == 480
    assert engine.manager.stats[1].evicted_unread_chunks == 472


def test_an_operator_switches_it_off_and_on(make: Make) -> None:
    engine = thrashed(make)
    stats, options = engine.manager.stats[1], engine.manager.clients[0].spec.runner
    assert stats.is_selective
    options.set_live(options.model_copy(update={"admission": "off"}))
    store_each(engine, KEYS[500:510])
    assert not stats.is_selective
    assert set(KEYS[502:510]) <= set(engine.tiers[0]._objects)
    options.set_live(options.model_copy(update={"admission": "auto"}))
    store_each(engine, KEYS[600:610])
    assert stats.is_selective


def test_an_operators_delete_teaches_no_capacity_and_is_no_eviction(make: Make) -> None:
    engine = make(slots=4)
    tier = engine.tiers[0]
    limit(engine, 200)
    for number, key in enumerate(KEYS[:800]):
        engine.store(A, key)
        engine.step()
        if number % 100 == 50:
            asyncio.run(tier.delete(list(tier._objects)))
    engine.step()
    stats = engine.manager.stats[1]
    assert (stats.stored_chunks, stats.not_admitted_chunks) == (800, 0)
    assert (stats.evicted_chunks, stats.evicted_unread_chunks) == (0, 0)
    engine.at_rest()


def test_what_an_operator_deletes_from_a_full_tier_is_room(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvtier.tier"):
        engine = thrashed(make)
    tier, stats = engine.tiers[0], engine.manager.stats[1]
    assert stats.is_selective
    assert "tier0: is full, and takes only chunks that were seen before" in caplog.text
    asyncio.run(tier.delete(list(tier._objects)))
    engine.step()
    assert not stats.is_selective
    store_each(engine, KEYS[500:508])
    assert set(tier._objects) == set(KEYS[500:508])
    engine.at_rest()


@pytest.fixture
def full() -> Rig:
    rig = Rig(50)
    rig.play(popular_and_passing(3000, popular=100))
    assert rig.stats.is_selective
    return rig


@pytest.mark.parametrize(
    "steps",
    [
        [Usage(50, 50, 50), REFUSED],
        [Usage(48, 48, 50), REFUSED],
        [Usage(40, 40, 50), TAKEN],
        [Usage(50, 50, None), TAKEN],
        [None, TAKEN],
        # The disk filled up before the tier reached its capacity, so only the disk's room counts.
        *[
            [Usage(50, 50, capacity, 10), EVICTS, REFUSED, Usage(49, 49, capacity, free), end]
            for capacity in (200, None)
            for free, end in ((10, REFUSED), (12, REFUSED), (20, TAKEN))
        ],
        # The disk was full before the tier's usage was first read.
        *[
            [Usage(0, 0, cap, 1000), EVICTS, REFUSED, Usage(50, 50, cap, 10), REFUSED, room, TAKEN]
            for cap, room in ((50, Usage(30, 30, 50, 1000)), (None, Usage(30, 30, None, 1000)))
        ],
        # The tier reached its capacity, so the disk's free space does not matter.
        [Usage(50, 50, 50, 1000), EVICTS, Usage(30, 30, 50, 900), TAKEN],
    ],
    ids=str,
)
def test_a_full_tier_takes_new_chunks_when_it_has_room(
    full: Rig, steps: list[Usage | str | None]
) -> None:
    for number, step in enumerate(steps, 9_000_000):
        if step == EVICTS:
            full.admission.removed([key_of(number)], evicted=True)
        elif isinstance(step, str):
            assert full.takes(number) is (step == TAKEN)
        else:
            full.stats.note_usage(step)


def test_a_tier_that_nothing_comes_back_to_is_refused_nothing(make: Make) -> None:
    engine = make(slots=4)
    limit(engine, 8)
    store_each(engine, KEYS[:400])
    assert engine.manager.stats[1].not_admitted_chunks == 0
    engine.at_rest()
