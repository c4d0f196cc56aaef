"""A tier's list of its store: what is told at once, with a scan, and after a crash."""

from __future__ import annotations

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
from kvtier_sdk.types import Entry

CHUNKS = dict(chunk(0, place) for place in range(6))
KEYS = list(CHUNKS)


def known(engine: Engine) -> set[OffloadKey]:
    engine.tell_everything()
    return {key for key in KEYS if key in engine.publisher._chunks._chunks}


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


def test_a_purge_takes_the_notes_too() -> None:
    with engines_on_one_store(1) as (engine,):
        store(engine, *KEYS)
        engine.run(2 * INTERVAL_S)
        engine.client.purge()
        engine.run(2 * INTERVAL_S)
        assert not SharedTier.shared[0]
        assert known(engine) == set()
