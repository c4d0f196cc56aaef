from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
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
    done = kvtier("replay", *options, "--report", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    return page, json.loads(done.stdout)


def test_it_loads_nothing(played: tuple[Path, dict[str, Any]]) -> None:
    page, _ = played
    assert re.findall(r'@import|\b(?:src|href)="(?!data:).*|\bfetch\(', page.read_text()) == []


def test_its_figures_are_those_of_the_report(played: tuple[Path, dict[str, Any]]) -> None:
    page, report = played
    written = page.read_text()
    assert f"<h1>Replay of {html.escape(NAME)}</h1>" in written
    assert "<b>it's" not in written
    text = re.sub(r"<[^>]+>", " ", written)
    assert f"{report['hit_rate']:.1%}" in text
    assert f"{report['hit_blocks']:,} of {report['blocks']:,}" in text
    for tier in report["tiers"]:
        share = f"{tier['hit_blocks'] / report['blocks']:.1%}, {tier['hit_blocks']:,} chunks"
        assert share in text
    _, _, waits = map(tips, drawings(written))
    assert sum(number(of) for column in waits for of in column.values()) == report["requests"]


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def tips(drawing: ET.Element) -> list[dict[str, str]]:
    """Return the tooltip of each column as a mapping of names to values."""
    titles = [title.text or "" for title in drawing.iter("title")]
    return [dict(line.rsplit(": ", 1) for line in title.split("\n")[1:]) for title in titles]


def number(text: str) -> int:
    return int(text.replace(",", ""))
