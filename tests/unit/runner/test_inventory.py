from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("zmq")

from support.shared_store import (
    CHUNK_BYTES,
    INTERVAL_S,
    REQUEST,
    Engine,
    SharedTier,
    chunk,
    engines_on_one_store,
    lose,
    stored_keys,
)

from kvtier_sdk import OffloadKey, TierUnavailableError
from kvtier_sdk.errors import ChunkAuthError
from kvtier_sdk.types import Capability, Entry, split_offload_key

CHUNKS = dict(chunk(0, place) for place in range(6))
KEYS = list(CHUNKS)


def known(engine: Engine) -> set[OffloadKey]:
    engine.tell_everything()
    return {key for key in KEYS if key in engine.publisher._chunks._tiers["shared"]}


def store(engine: Engine, *keys: OffloadKey) -> None:
    engine.notes.update(CHUNKS)
    engine.client.store(keys, range(len(keys)), REQUEST)
    engine.run(0.001)


def test_a_chunk_that_is_evicted_while_it_is_stored_is_not_told() -> None:
    with engines_on_one_store(1, capacity=3 * CHUNK_BYTES) as (engine,):
        store(engine, *KEYS)
        assert 0 < len(stored_keys()) < len(KEYS)
        assert known(engine) == stored_keys()


def test_a_lookup_that_misses_withdraws_a_chunk_before_the_next_scan() -> None:
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        lose(KEYS[:2])
        engine.client.lookup(KEYS, REQUEST)
        engine.run(0.001)
        assert known(engine) == set(KEYS[2:])


def test_a_store_that_cannot_be_listed_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(self: SharedTier) -> object:
        yield Entry(KEYS[0], CHUNK_BYTES)
        raise TierUnavailableError("away")

    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        monkeypatch.setattr(SharedTier, "scan", refused)
        engine.run(3 * INTERVAL_S)
        assert known(engine) == set(KEYS)


def test_a_crash_costs_announcements_and_makes_no_false_one() -> None:
    with engines_on_one_store(1) as (engine,):
        engine.run(0.001)
        store(engine, *KEYS[:3])
        engine.run(2 * INTERVAL_S)
        store(engine, *KEYS[3:])
        engine.restart(in_time=False, at_rest=False)
        engine.run(2 * INTERVAL_S)
        engine.router.catch_up()
        told = {block for _, _, block in engine.router.blocks}
        assert len(told) == 2 * 3


def test_segments_go_with_their_chunks() -> None:
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        engine.run(2 * INTERVAL_S)
        assert len(stored_keys(segments=True)) == 1
        engine.restart(in_time=True)
        lose(KEYS)
        engine.run(4 * INTERVAL_S)
        assert not stored_keys(segments=True)


def test_segments_of_chunks_that_are_lost_and_stored_again_do_not_add_up() -> None:
    with engines_on_one_store(2) as engines:
        for _ in range(4):
            for engine in engines:
                lose(KEYS[1:])
                store(engine, *KEYS)
                for each in engines:
                    each.scan_twice()
                engine.restart(in_time=True)
                engine.scan_twice()
        # One segment has the first chunk's note, and another has the notes of the last store.
        assert len(stored_keys(segments=True)) <= 2
        assert known(engines[0]) == known(engines[1]) == set(KEYS)


def test_a_purge_takes_the_notes_too() -> None:
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        engine.run(2 * INTERVAL_S)
        engine.client.purge()
        engine.run(2 * INTERVAL_S)
        assert not SharedTier.shared[0]
        assert known(engine) == set()


def watch_segments(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> Counter[tuple[int, OffloadKey]]:
    """Return live counts of loads by tier and segment. These loads fail if ``error`` is given."""
    loads: Counter[tuple[int, OffloadKey]] = Counter()
    load = SharedTier.load

    async def counted(self: SharedTier, batch: Sequence[Any]) -> Sequence[Any]:
        segments = [one.key for one in batch if split_offload_key(one.key)[1]]
        loads.update((id(self), key) for key in segments)
        return [error] if segments and error is not None else await load(self, batch)

    monkeypatch.setattr(SharedTier, "load", counted)
    return loads


def test_segments_are_read_twice_at_most_while_another_engine_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engines_on_one_store(2) as (writer, reader):
        store(writer, KEYS[0])
        writer.restart(in_time=True)
        loads = watch_segments(monkeypatch)
        for key in KEYS[1:]:
            reader.run(INTERVAL_S)
            store(writer, key)
            reader.run(INTERVAL_S)
            writer.run(INTERVAL_S)
        reader.scan_twice()
        assert known(reader) == set(KEYS)
        assert loads
        assert max(loads.values()) <= 2


def test_a_segment_that_cannot_be_read_stays_for_those_who_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        loads = watch_segments(monkeypatch, ChunkAuthError("of others", unknown_key=True))
        engine.restart(in_time=True)
        engine.run(5 * INTERVAL_S)
        assert loads.total() == 2
        assert len(stored_keys(segments=True)) == 1


def test_a_malformed_note_costs_its_own_chunk_only() -> None:
    with engines_on_one_store(1) as (engine,):
        engine.notes.update(CHUNKS)
        engine.notes[KEYS[0]] = b"\xff"
        engine.client.store(KEYS, range(len(KEYS)), REQUEST)
        engine.run(0.001)
        engine.restart(in_time=True)
        engine.run(2 * INTERVAL_S)
        engine.tell_everything()
        assert len(engine.router.blocks) == 2 * (len(KEYS) - 1)
        lose(KEYS)
        engine.run(2 * INTERVAL_S)
        assert known(engine) == set()


def test_a_tier_that_cannot_be_listed_gets_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedTier, "capabilities", SharedTier.capabilities & ~Capability.SCAN)
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        engine.restart(in_time=True)
        assert stored_keys() == set(KEYS)
        assert not stored_keys(segments=True)


def test_notes_whose_store_is_cut_off_by_the_close_are_stored_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs = [True]
    put = SharedTier.store

    async def hang_once(self: SharedTier, batch: Sequence[Any]) -> Sequence[Any]:
        if split_offload_key(batch[0].key)[1] and hangs:
            hangs.clear()
            await asyncio.Event().wait()
        return await put(self, batch)

    monkeypatch.setattr(SharedTier, "store", hang_once)
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        engine.run(INTERVAL_S + 1.0)
        assert not hangs
        engine.restart(in_time=True)
        assert len(stored_keys(segments=True)) == 1
