from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.core import pure_core_only
from support.simulation import Breach, soak
from support.simulation.__main__ import main

from kvtier_sdk.tiering.manager import TieringManager

#: Five of the seeds 160 to 219 load a chunk while a tier is unreachable. Few other seeds do.
FIRST_SEED, SEEDS = 160, 60
TESTS = Path(__file__).parents[1]

#: Events that a short run must contain, grouped by their first words.
MET = {
    "": "preemptions, choosy requests, touches, results of jobs that were over, lookups put off, "
    "chunks stored compressed",
    "requests ": "finished while running",
    "requests aborted while ": "waiting, loading, running",
    "resets of ": "primary, all",
    "ends: ": "finish, aborted, shut down",
    "lookup ": "HIT, MISS, HIT_PENDING, RETRY",
    "chunks ": "evicted, rejected, loaded from a tier, loaded without a lookup",
    "stores ": "failed",
    "load ": "ok, corrupt, timeout, unavailable",
    "store ": "ok, timeout, capacity, unavailable",
    "trouble: ": "outage, refused opening, hang, late, damage, stall, taken out",
    "dropped: ": "store.drained",
    "read ": "breaker opened",
    "write ": "breaker opened",
    "miss: ": "absent, timeout, unavailable, load_failed, "
    "primary_full, queue_full, slower_than_recompute",
    "hint ": "retain: clipped, resume_in: accepted, demote: accepted, end: accepted, "
    "unknown: refused",
    "hint pin: ": "accepted, clipped, refused",
    "hint prefetch: ": "accepted, clipped, deferred, refused, expired",
    "policy: ": "returns, lru, arc",
    "store policy: ": "through, on_evict, after_hits:2",
}


def test_no_rule_is_broken_and_everything_is_met() -> None:
    met = [kind + what for kind, several in MET.items() for what in several.split(", ")]
    # Use one process, because other tests use the other cores.
    report = soak(FIRST_SEED, SEEDS, processes=1)
    assert report.seeds == SEEDS
    assert report.steps > 50 * SEEDS
    assert [what for what in met if not report.counts[what]] == []


def test_a_seed_decides_everything() -> None:
    again = soak(0, 8, processes=1)
    script = "from support.simulation import soak; print(soak(0, 8, processes=2).digest)"
    output = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert int(output.stdout) == again.digest, "not even the hashes of the process matter"


@pure_core_only
def test_a_breach_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TieringManager, "touch", lambda self, keys, request: keys[10_000])
    with pytest.raises(Breach) as caught:
        soak(0, 20, processes=1)
    breach = caught.value
    assert breach.rule == "the manager never raises"
    assert "IndexError" in breach.message
    assert main(["--seed", str(breach.seed)]) == 1
    told = capsys.readouterr().err
    assert f"make soak SEED={breach.seed}" in told
    assert f"--seed {breach.seed} --trace" in told
    assert "touch" in told, "the last actions"
    assert main(["--first", str(breach.seed), "--seeds", "1"]) == 1
