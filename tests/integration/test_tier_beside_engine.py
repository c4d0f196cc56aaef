"""``kvtier tier`` does not change the hits of an engine that uses the same store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import kvtier

from kvtier_file import recency
from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import ReplayReport, chat_workload, replay

CHUNK_BYTES = 4096
_WORKLOAD = chat_workload(500, 3)


def play(root: Path) -> ReplayReport:
    """Replay a workload larger than the tier, so that the hits depend on what is evicted."""
    options = {
        "slots": 50,
        "policy": "lru",
        "chunk_bytes": CHUNK_BYTES,
        "tiers": [f"file://{root}?direct_io=off&capacity=4MiB&admission=off&runner=thread"],
    }
    return replay(_WORKLOAD, TieringConfig.from_dict(options), concurrency=1)


@contextmanager
def tools_at_work(root: Path, runs: list[str]) -> Iterator[None]:
    """Run ``kvtier tier`` commands during the block; append the successful ones to ``runs``."""
    # The limits are so low that a command which applied them would remove chunks.
    url = f"file://{root}?direct_io=off&capacity=400KiB&min_free=90%"
    ended = threading.Event()

    def work() -> None:
        while not (root.exists() or ended.wait(0.01)):
            pass
        while not ended.is_set():
            for words in (["ls"], ["verify"], ["du"], ["explain", "--key", "00"]):
                done = kvtier("tier", words[0], "--json", url, *words[1:])
                # A command can fail while the engine still creates the files of its tier.
                if done.returncode == 0 and json.loads(done.stdout):
                    runs.append(words[0])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def outcome(report: ReplayReport) -> tuple[int, ...]:
    primary, file = report.tiers
    return (
        report.hit_chunks,
        primary.hit_chunks,
        file.hit_chunks,
        file.stored_chunks,
        file.evicted_chunks,
        sum(file.failures.values()),
    )


def test_an_engine_hits_and_evicts_as_it_does_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Evict only in the order of use, because the default order also depends on the engine's speed.
    monkeypatch.setattr(recency, "_STAY", (1.0,) * len(recency._STAY))
    alone = play(tmp_path / "alone")
    runs: list[str] = []
    with tools_at_work(tmp_path / "watched", runs):
        watched = play(tmp_path / "watched")
    assert set(runs) == {"ls", "verify", "du", "explain"}
    assert alone.tiers[1].hit_chunks > 100
    assert alone.tiers[1].evicted_chunks > 100
    assert outcome(watched) == outcome(alone)
