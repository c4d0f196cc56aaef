"""The HTML report of a replay is readable in a real browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, open_browser
from support.command import kvtier
from support.played import write_trace

pytestmark = pytest.mark.reader

#: A trace's name that contains HTML. The page must show the name as text.
NAME = "<b>it's & co.jsonl"
WINDOWS = [(width, scheme) for width in (400, 1600) for scheme in ("light", "dark")]
#: A script that finds texts that overlap or are cut off at the edge of their chart.
UNREADABLE = """
[...document.querySelectorAll("svg")].flatMap(svg => {
  const edge = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")];
  const boxes = texts.map(text => text.getBoundingClientRect());
  const bad = boxes.map((one, at) => one.left < edge.left - 1 || one.right > edge.right + 1
    || one.top < edge.top - 1 || one.bottom > edge.bottom + 1
    || boxes.slice(at + 1).some(other => one.left < other.right && other.left < one.right
      && one.top < other.bottom && other.top < one.bottom));
  return texts.filter((_, at) => bad[at]).map(text => text.textContent);
})
"""
#: A script that finds elements that are too narrow for their content.
OVERFLOWING = """
[...document.querySelectorAll("header, .tile, figure, .legend, section > *")]
  .filter(of => of.scrollWidth > of.clientWidth).map(of => of.textContent)
"""
#: A script that finds the smallest font size on the page, in pixels.
SMALLEST = """
Math.min(...[...document.querySelectorAll("body *")].filter(of => of.checkVisibility()
  && [...of.childNodes].some(child => child.nodeType === 3 && child.data.trim()))
  .map(of => parseFloat(getComputedStyle(of).fontSize)))
"""
COLORS = """
Object.fromEntries(["paper", "card", "ink", "dim", "host", "tier1", "tier2", "tier3"].map(name => {
  const style = getComputedStyle(document.documentElement);
  return [name, style.getPropertyValue(`--${name}`).trim()];
}))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("page")
    trace, _ = write_trace(directory / NAME)
    page = directory / "page.html"
    options = ["--slots", "100", "--chunk-bytes", "8KiB", "--trace", str(trace), "--json"]
    options += ["--tier", "memory:?capacity=1MiB", "--tier", "memory:?name=far"]
    done = kvtier("replay", *options, "--report", str(page), "--compression-ratio", "1.5")
    assert (done.returncode, done.stderr) == (0, "")
    return page, json.loads(done.stdout)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def luminance(color: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    digits = color.removeprefix("#")
    parts = (
        [digits[at : at + 2] for at in (0, 2, 4)] if len(digits) == 6 else [2 * of for of in digits]
    )
    shares = [int(part, 16) / 255 for part in parts]
    linear = [of / 12.92 if of <= 0.04045 else ((of + 0.055) / 1.055) ** 2.4 for of in shares]
    return sum(weight * of for weight, of in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_it_renders_readably_and_loads_nothing(
    browser: Browser, played: tuple[Path, dict[str, Any]], width: int, scheme: str
) -> None:
    page, _ = played
    browser.show(page, width=width, height=900, scheme=scheme)
    names = [name for name, _ in browser.events]
    loaded = [
        told["request"]["url"]
        for name, told in browser.events
        if name == "Network.requestWillBeSent"
    ]
    assert [url for url in loaded if not url.startswith("data:")] == [page.as_uri()]
    for complaint in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
        assert complaint not in names, browser.events
    assert (
        browser.run(
            "[...document.querySelectorAll('.chart svg')].map(of => of.children.length > 9)"
        )
        == [True] * 5
    )
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OVERFLOWING) == []
    assert browser.run(UNREADABLE) == []
    assert browser.run(SMALLEST) >= 12
    colors = browser.run(COLORS)
    assert (luminance(colors["paper"]) < 0.5) == (scheme == "dark")
    for ground in ("paper", "card"):
        assert min(contrast(colors[ground], colors[text]) for text in ("ink", "dim")) >= 4.5
    assert (
        min(contrast(colors["card"], colors[of]) for of in ("host", "tier1", "tier2", "tier3")) >= 3
    )


def test_a_value_is_shown_under_the_pointer_and_by_the_keys(
    browser: Browser, played: tuple[Path, dict[str, Any]]
) -> None:
    page, _ = played
    browser.show(page, width=1600, height=900, scheme="light")
    tip = "document.querySelector('.chart .tip:not([hidden])')?.innerText"
    assert browser.run(tip) is None
    place = browser.run("document.querySelector('.chart').getBoundingClientRect().toJSON()")
    browser.call(
        "Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 50, y=place["y"] + 50
    )
    assert browser.run(tip).startswith("request 1\nhost pool: 0.0%")
    browser.run("document.querySelector('.chart svg').focus()")
    for _ in range(2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert browser.run(tip).startswith("request 3\n")


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
    by_request = charts[2]["series"]
    assert [sum(of["values"]) for of in by_request[:-1]] == [
        of["hit_blocks"] for of in report["tiers"]
    ]
    assert sum(by_request[-1]["values"]) == report["blocks"] - report["hit_blocks"]
    waits = charts[3]["series"]
    assert sum(sum(of["values"]) for of in waits) == report["requests"]
