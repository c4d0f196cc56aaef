"""Draws charts as SVG, and writes them into self-contained HTML pages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

#: The edges of the plot area and the approximate width of a letter, in SVG units.
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 608, 20, 200
_LETTER = 7


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart, or one part of each stacked column."""

    name: str
    color: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    kind: str
    title: str
    note: str
    unit: str
    heads: Sequence[str]
    labels: Sequence[str]
    series: Sequence[Series]
    text: Callable[[float], str]
    top: float = 0.0
    marks: Sequence[tuple[float, str]] = ()


def document(title: str, body: str) -> str:
    """Return an HTML page that contains ``body`` and loads no other files."""
    return _template().replace("@BODY@", body).replace("@TITLE@", escape(title), 1)


def svg_file(chart: Chart) -> str:
    """Return a chart as an SVG file, with its title and the names of its series."""
    styles = re.findall(r"<style>.*?</style>", _template(), re.DOTALL)
    names = [("ink", chart.title), *((of.color, of.name) for of in chart.series)]
    words = "".join(
        f'<text x="{_LEFT + 8}" y="{_TOP + 14 * at}" style="fill:var(--{color})">{escape(name)}'
        "</text>"
        for at, (color, name) in enumerate(names, 1)
    )
    head, _, rest = drawing(chart).partition(">")
    name_space = 'xmlns="http://www.w3.org/2000/svg"'
    return f"{head} {name_space}>{styles[0]}{rest.removesuffix('</svg>')}{words}</svg>\n"


def _template() -> str:
    return (files("kvtier_sdk.cli") / "page.html").read_text(encoding="utf-8")


def ticks(top: float) -> tuple[float, list[float]]:
    """Return a round axis limit of at least ``top``, and at most six round tick values."""
    if not top:
        return 1.0, [0.0, 1.0]
    decade = 10.0 ** math.floor(math.log10(top))
    step = next(of * decade for of in (0.2, 0.5, 1.0, 2.0) if top <= 5 * of * decade)
    count = math.ceil(top / step - 1e-9)
    return count * step, [at * step for at in range(count + 1)]


def figure(chart: Chart) -> str:
    columns = [chart.unit, *(of.name for of in chart.series)]
    rows = [
        [head, *(chart.text(of.values[at]) for of in chart.series)]
        for at, head in enumerate(chart.heads)
    ]
    return (
        f"<figure><h2>{escape(chart.title)}</h2>"
        f"{legend((of.color, of.name) for of in chart.series)}"
        f"{drawing(chart)}"
        f"<figcaption>{escape(chart.note)}</figcaption>"
        f"<details><summary>As a table</summary>{table(columns, *rows)}</details></figure>"
    )


def drawing(chart: Chart) -> str:
    """Return a chart as SVG, with a tooltip for each column's values."""
    values = [of.values for of in chart.series]
    heights = map(max if chart.kind == "curve" else sum, zip(*values, strict=True))
    top, steps = ticks(chart.top or max(heights, default=0))
    column = (_RIGHT - _LEFT) / max(1, len(chart.heads))

    def x(at: float) -> float:
        return _LEFT + at * column

    def y(value: float) -> float:
        return _BOTTOM - value / top * (_BOTTOM - _TOP)

    drawn = []
    for step in steps:
        drawn.append(f'<path class="grid" d="M{_LEFT} {y(step):.1f}H{_RIGHT}"/>')
        drawn.append(_text(_LEFT - 6, y(step) + 4, "end", chart.text(step).replace(".0%", "%")))
    free = 0.0
    for at, label in enumerate(chart.labels):
        half = _LETTER / 2 * len(label)
        if x(at + 0.5) - half >= free:
            middle = min(x(at + 0.5), _RIGHT + 12 - half)
            drawn.append(_text(middle, _BOTTOM + 16, "middle", label))
            free = x(at + 0.5) + half + 16
    drawn.append(_text(x(len(chart.heads) / 2), _BOTTOM + 36, "middle", chart.unit))
    below = [0.0] * len(chart.heads)
    for of in chart.series:
        if chart.kind == "curve":
            points = " ".join(f"{x(at + 0.5):.1f},{y(of):.1f}" for at, of in enumerate(of.values))
            drawn.append(f'<polyline points="{points}" style="stroke:var(--{of.color})"/>')
            continue
        for at, value in enumerate(of.values):
            if value:
                place = f'x="{x(at):.1f}" y="{y(below[at] + value):.1f}" width="{0.9 * column:.1f}"'
                size = f'height="{y(below[at]) - y(below[at] + value):.1f}"'
                drawn.append(f'<rect {place} {size} style="fill:var(--{of.color})"/>')
                below[at] += value
    for where, label in chart.marks:
        middle = x(where + 0.5)
        drawn.append(f'<path class="mark" d="M{middle:.1f} {_TOP}V{_BOTTOM}"/>')
        side = "end" if 2 * where > len(chart.heads) else "start"
        drawn.append(_text(middle, _TOP - 4, side, label))
    for at, head in enumerate(chart.heads):
        tip = [head, *(f"{of.name}: {chart.text(of.values[at])}" for of in chart.series)]
        place = f'x="{x(at):.1f}" y="{_TOP}" width="{column:.1f}" height="{_BOTTOM - _TOP}"'
        title = escape("\n".join(tip))
        drawn.append(f'<rect class="tip" {place}><title>{title}</title></rect>')
    box = f'viewBox="0 0 {_RIGHT + 12} {_BOTTOM + 40}"'
    return f'<svg {box} role="img" aria-label="{escape(chart.title)}">{"".join(drawn)}</svg>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><i style="background:var(--{color})"></i>{escape(text)}</li>'
        for color, text in entries
    )
    return f'<ul class="legend">{items}</ul>'


def table(columns: Sequence[str], *rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in columns)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(of)}</td>" for of in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
