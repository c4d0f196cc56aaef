"""Writes a self-contained HTML page about a replay, with figures, charts and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from kvtier_sdk.cli.replay import PoolSweep, ReplayReport
from kvtier_sdk.cli.replay.charts import Chart, charts, percent, sources, ticks, waits
from kvtier_sdk.cli.replay.sessions import percentile
from kvtier_sdk.cli.replay.view import sections, troubles
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.options.units import format_bytes, format_seconds

#: The edges of a chart's columns, and about the width of a letter, in the drawing's units.
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 588, 10, 200
_LETTER = 7


@dataclass(frozen=True, slots=True)
class Played:
    """The facts about a replay that its report lacks."""

    workload: str
    concurrency: int
    options: str


def replay_page(report: ReplayReport, sweep: PoolSweep, played: Played) -> str:
    words = {
        "TITLE": escape(f"kvtier replay: {played.workload}"),
        "BODY": _body(report, sweep, played),
    }
    page = (files("kvtier_sdk.cli.replay") / "page.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: words[found[1]], page)


def _body(report: ReplayReport, sweep: PoolSweep, played: Played) -> str:
    figures = "".join(map(_figure, charts(report, sweep)))
    tables = "".join(
        f"<section><h2>{part.title}</h2><p>{escape(part.text)}</p>{_table(*part.rows)}"
        f"<p>{escape(part.note)}</p></section>"
        for part in sections(report, overlapped=played.concurrency > 1)
    )
    return (
        f"<header><h1>Replay of {escape(played.workload)}</h1>"
        f'<p class="dim">{escape(_setup(report, sweep, played))}</p></header>'
        f"{_complaints(report)}{_tiles(report)}{_origins(report)}"
        f'<main class="charts">{figures}</main>{tables}'
        f"<section><h2>Waits</h2>{_wait_table(report)}</section>"
        "<section><details><summary>The configuration that was played</summary>"
        f"<pre>{escape(played.options)}</pre></details></section>"
    )


def _setup(report: ReplayReport, sweep: PoolSweep, played: Played) -> str:
    pool = format_bytes(sweep.pool.slots * report.chunk_bytes)
    behind = ", ".join(tier.name for tier in report.tiers[1:])
    at_once = "one request at a time"
    if played.concurrency > 1:
        at_once = f"{played.concurrency:,} requests at a time"
    return (
        f"{report.requests:,} requests of {report.chunks:,} chunks of "
        f"{format_bytes(report.chunk_bytes)}, {at_once}. Host pool: {pool}, {sweep.policy}. "
        f"Tiers: {behind or 'none'}."
    )


def _complaints(report: ReplayReport) -> str:
    wrong = [f"{report.wrong_bytes:,} bytes came back wrong"] if report.wrong_bytes else []
    lines = [*wrong, *troubles(report)]
    return "".join(f'<p class="bad">{escape(line)}</p>' for line in lines)


def _tiles(report: ReplayReport) -> str:
    host, *behind = report.tiers
    tiles = [
        (
            "hit rate",
            percent(report.hit_rate),
            f"{report.hit_chunks:,} of {report.chunks:,}",
        ),
        ("between device and host pool", *_moved([host])),
        ("between host pool and tiers", *_moved(behind)),
        (
            "compared with what was stored",
            format_bytes(report.compared_bytes),
            f"{report.wrong_bytes:,} bytes wrong" if report.wrong_bytes else "all equal",
        ),
    ]
    if tokens := sum(report.saved_tokens):
        times = [f"{format_seconds(of.compute_s)} of computing" for of in report.time_saved]
        tiles.insert(1, ("not computed", f"{tokens:,} tokens", "".join(times[-1:])))
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile"><span>{name}</span><b>{value}</b><span>{note}</span></div>'
            for name, value, note in tiles
        )
    )


def _moved(tiers: Sequence[TierStats]) -> tuple[str, str]:
    stored = sum(tier.stored_bytes for tier in tiers)
    loaded = sum(tier.loaded_bytes for tier in tiers)
    parts = f"{format_bytes(stored)} stored, {format_bytes(loaded)} loaded"
    return format_bytes(stored + loaded), parts


def _origins(report: ReplayReport) -> str:
    origins = sources(report)
    parts = "".join(
        f'<div style="flex:{of.chunks} 0 0;background:var(--{of.color})"></div>'
        for of in origins
        if of.chunks
    )
    legend = _legend(
        (of.color, f"{of.name} {percent(of.chunks / max(1, report.chunks))}, {of.chunks:,} chunks")
        for of in origins
    )
    return (
        "<section><h2>Where the chunks came from</h2>"
        f'<div class="share">{parts}</div>{legend}</section>'
    )


def _figure(chart: Chart) -> str:
    columns = [chart.unit, *(of.name for of in chart.series)]
    rows = [
        [head, *(chart.text(of.values[at]) for of in chart.series)]
        for at, head in enumerate(chart.heads)
    ]
    return (
        f"<figure><h2>{escape(chart.title)}</h2>"
        f"{_legend((of.color, of.name) for of in chart.series)}"
        f"{_drawing(chart)}"
        f"<figcaption>{escape(chart.note)}</figcaption>"
        f"<details><summary>As a table</summary>{_table(columns, *rows)}</details></figure>"
    )


def _drawing(chart: Chart) -> str:
    """Draw a chart. The pointer shows the values of a column."""
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
            drawn.append(_text(x(at + 0.5), _BOTTOM + 16, "middle", label))
            free = x(at + 0.5) + half + 16
    drawn.append(_text(x(len(chart.heads) / 2), _BOTTOM + 36, "middle", chart.unit))
    below = [0.0] * len(chart.heads)
    for of in chart.series:
        if chart.kind == "curve":
            points = " ".join(f"{x(at + 0.5):.1f},{y(of):.1f}" for at, of in enumerate(of.values))
            kind = ' class="dashed"' if of.dashed else ""
            drawn.append(f'<polyline{kind} points="{points}" style="stroke:var(--{of.color})"/>')
            continue
        for at, value in enumerate(of.values):
            if value:
                place = f'x="{x(at):.1f}" y="{y(below[at] + value):.1f}" width="{0.9 * column:.1f}"'
                size = f'height="{y(below[at]) - y(below[at] + value):.1f}"'
                drawn.append(f'<rect {place} {size} style="fill:var(--{of.color})"/>')
                below[at] += value
    for row, (where, label) in enumerate(chart.marks):
        middle = x(where + 0.5)
        drawn.append(f'<path class="mark" d="M{middle:.1f} {_TOP}V{_BOTTOM}"/>')
        side, beside = ("end", -5) if 2 * where > len(chart.heads) else ("start", 5)
        drawn.append(_text(middle + beside, _BOTTOM - 8 - 16 * row, side, label))
    for at, head in enumerate(chart.heads):
        tip = [head, *(f"{of.name}: {chart.text(of.values[at])}" for of in chart.series)]
        place = f'x="{x(at):.1f}" y="{_TOP}" width="{column:.1f}" height="{_BOTTOM - _TOP}"'
        title = escape("\n".join(tip))
        drawn.append(f'<rect class="tip" {place}><title>{title}</title></rect>')
    box = f'viewBox="0 0 {_RIGHT + 12} {_BOTTOM + 40}"'
    return f'<svg {box} role="img" aria-label="{escape(chart.title)}">{"".join(drawn)}</svg>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _wait_table(report: ReplayReport) -> str:
    columns = ["requests", "number", "p50", "p90", "p99", "longest"]
    rows = []
    for of in waits(report):
        ordered = of.values
        marks = [percentile(ordered, share) for share in (50, 90, 99)]
        rows.append([of.name, f"{len(ordered):,}", *map(format_seconds, [*marks, ordered[-1]])])
    return _table(columns, *rows)


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><i style="background:var(--{color})"></i>{escape(text)}</li>'
        for color, text in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _table(columns: Sequence[str], *rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in columns)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(of)}</td>" for of in rest)
        + "</tr>"
        for first, *rest in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{table}</div>'
