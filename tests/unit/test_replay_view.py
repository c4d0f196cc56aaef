from __future__ import annotations

import pytest

from kvtier_sdk.cli.replay import ReplayHistory, ReplayReport
from kvtier_sdk.cli.replay.view import print_report
from kvtier_sdk.metrics import TierStats


def report_of(
    tier: TierStats, *, wrong_bytes: int = 0, recompute_s: float | None = None
) -> ReplayReport:
    return ReplayReport(
        requests=10,
        chunks=100,
        hit_chunks=50,
        chunk_bytes=2**20,
        compared_bytes=50 * 2**20,
        wrong_bytes=wrong_bytes,
        elapsed_s=2.0,
        tiers=[TierStats("host", "primary"), tier],
        left_over={},
        history=ReplayHistory([], sources=2),
        recompute_s=recompute_s,
    )


def test_speed_is_that_of_the_time_under_way_and_never_below_that_of_the_whole_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tier = TierStats("disk", "file", stored_bytes=10**9)
    tier.job_s["store"].observe(0.5)
    # Eight loads always ran at once, so their durations add up to eight times the run's length.
    tier.loaded_bytes = 3 * 10**9
    tier.job_s["load"].observe(16.0)
    print_report(report_of(tier))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("disk"))
    assert row.split()[-6:] == ["MiB", "2.00", "2.794", "GiB", "1.50", "0"]


def test_a_tier_whose_loads_take_longer_than_computing_costs_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tier = TierStats("disk", "file", hit_chunks=50)
    tier.job_s["load"].observe(16.0)
    print_report(report_of(tier, recompute_s=0.04))
    printed = capsys.readouterr().out
    assert "time saved, at 40 ms of computing a chunk" in printed
    assert "disk           2 s        16 s  -14 s" in printed
