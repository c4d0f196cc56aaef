"""Routers know a shared store's exact contents, despite lost messages, crashes and other processes.

``KVTIER_INVENTORY_EVENTS`` sets the number of changes.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

pytest.importorskip("zmq")

from support.shared_store import (
    REQUEST,
    Engine,
    chunk,
    engines_on_one_store,
    lose,
    stored_keys,
)

from kvtier_sdk.events import read_note

EVENTS = int(os.environ.get("KVTIER_INVENTORY_EVENTS", "4000"))


def told_by(engine: Engine) -> set[int]:
    engine.tell_everything()
    counts = engine.router.blocks
    assert set(counts.values()) <= {1}, "a router that counts would be wrong"
    return {block for _, _, block in counts}


def test_what_is_announced_is_there() -> None:
    rng = random.Random(7)
    chunks = dict(chunk(line, place) for line in range(24) for place in range(6))
    keys = list(chunks)
    done: Counter[str] = Counter()

    def really() -> set[int]:
        notes = [read_note(key, chunks[key]) for key in stored_keys()]
        return {block for note in notes for block in note.block_hashes}

    def step(engine: Engine) -> None:
        some = rng.sample(keys, rng.randint(1, 8))
        what = rng.choices(
            ["store", "delete", "evict", "lookup", "time", "idle", "loss of tier", "restart"],
            [300, 60, 60, 60, 20, 20, 1, 1],
        )[0]
        done[what] += len(some)
        if what == "store":
            engine.notes.update({key: chunks[key] for key in some})
            engine.client.store(some, range(len(some)), REQUEST)
        elif what == "delete":
            engine.client.delete(some)
        elif what == "lookup":
            engine.client.lookup(some, REQUEST)
        elif what == "evict":
            lose(some)
        elif what == "loss of tier":
            engine.lose_tier()
        elif what == "restart":
            engine.restart(in_time=rng.random() < 0.5)
        engine.run(40.0 if what == "time" else 0.001, is_idle=what == "idle")
        engine.router.listen(0.001)

    with engines_on_one_store(2) as engines:
        checked = 0
        while done.total() < EVENTS:
            step(rng.choice(engines))
            if done.total() >= checked + EVENTS / 4:
                checked = done.total()
                for engine in 2 * engines:
                    engine.scan_twice()
                there = really()
                assert len(stored_keys(segments=True)) <= len(stored_keys())
                for engine in engines:
                    told = told_by(engine)
                    assert (told - there, there - told) == (set(), set()), dict(done)
        assert len(there) > 20
        assert all(engine.router.snapshots for engine in engines)
        assert min(done.values()) > 0
