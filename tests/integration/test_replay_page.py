"""The HTML report of a replay has the replay's figures, and is drawn in a real browser."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.author import run
from support.command import kvtier
from support.played import write_trace

pytestmark = pytest.mark.reader

#: A trace's name that contains HTML. The page must show the name as text.
NAME = "<b>it's & co.jsonl"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("page")
    trace, _ = write_trace(directory / NAME)
    page = directory / "page.html"
    options = ["--slots", "100", "--chunk-bytes", "8KiB", "--trace", str(trace), "--json"]
    options += ["--tier", "memory:?capacity=1MiB", "--tier", "memory:?name=far"]
    options += ["--compression-ratio", "1.5", "--every-policy"]
    done = kvtier("replay", *options, "--report", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    return page, json.loads(done.stdout)


def test_a_browser_draws_its_charts(played: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    page, _ = played
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={tmp_path}", "--dump-dom"]
    # The charts are drawn when they are laid out, which may be after the page has loaded.
    command += ["--run-all-compositor-stages-before-draw", "--virtual-time-budget=5000"]
    drawn = run([*command, page.as_uri()], tmp_path)
    charts = re.findall(r'<div class="chart".*?</svg>', drawn, re.DOTALL)
    assert [chart.count("<") > 20 for chart in charts] == [True] * 5


def test_it_loads_nothing(played: tuple[Path, dict[str, Any]]) -> None:
    page, _ = played
    assert re.findall(r'@import|\b(?:src|href)="(?!data:).*|\bfetch\(', page.read_text()) == []


def test_its_figures_are_those_of_the_report(played: tuple[Path, dict[str, Any]]) -> None:
    page, report = played
    written = page.read_text()
    assert f"<h1>Replay of {html.escape(NAME)}</h1>" in written
    assert "<b>it's" not in written
    text = re.sub(r"<[^>]+>", " ", written.split("<script")[0])
    assert f"{report['hit_rate']:.1%}" in text
    assert f"{512 * report['hit_blocks']:,}" in text
    for tier in report["tiers"]:
        share = f"{tier['hit_blocks'] / report['blocks']:.1%}, {tier['hit_blocks']:,} chunks"
        assert share in text
    assert "pool that was played, and holds 1.5 times as many, since" in text
    charts = json.loads(re.findall(r'id="charts">(.*?)</script>', written)[0])
    # The last tier is unlimited, so the hit rate equals that of the sweep's largest pool.
    assert charts[-1]["series"][0]["values"][-1] == report["hit_rate"]
    assert len(charts[-1]["series"]) == 4
    for policy in ("returns", "arc", "lru"):
        assert f"pool alone, {policy}" in text
    by_request = charts[2]["series"]
    assert [sum(of["values"]) for of in by_request[:-1]] == [
        of["hit_blocks"] for of in report["tiers"]
    ]
    assert sum(by_request[-1]["values"]) == report["blocks"] - report["hit_blocks"]
    waits = charts[3]["series"]
    assert sum(sum(of["values"]) for of in waits) == report["requests"]
