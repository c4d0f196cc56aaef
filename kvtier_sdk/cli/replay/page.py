"""Writes a self-contained HTML page about a replay, with figures, charts and tables."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate, chain, cycle, pairwise
from operator import truediv
from typing import NamedTuple

from kvtier_sdk.cli.drawing import Chart, Series, document, figure, legend, table
from kvtier_sdk.cli.replay import ReplayReport
from kvtier_sdk.cli.replay.view import compared_line, sections, troubles
from kvtier_sdk.options.units import format_bytes, format_seconds

#: A chart has at most this many columns. For a longer trace, a column covers several requests.
_MOST_COLUMNS = 100
_MOST_DEPTHS = 40
_TIER_COLORS = ("tier1", "tier2", "tier3")
_percent = "{:.1%}".format


def replay_page(report: ReplayReport, workload: str, options: str) -> str:
    figures = "".join(map(figure, _charts(report)))
    tables = "".join(
        f"<section><h2>{part.title}</h2><p>{escape(part.text)}</p>{table(*part.rows)}"
        f"<p>{escape(part.note)}</p></section>"
        for part in sections(report)
    )
    wrong = [compared_line(report)] if report.wrong_bytes else []
    lines = [*wrong, *troubles(report)]
    complaints = "".join(f'<p class="bad">{escape(line)}</p>' for line in lines)
    return document(
        f"kvtier replay: {workload}",
        f"<header><h1>Replay of {escape(workload)}</h1>"
        f'<p class="dim">{escape(_setup(report))}</p></header>'
        f"{complaints}{_origins(report)}"
        f'<main class="charts">{figures}</main>{tables}'
        "<section><details><summary>The configuration that was played</summary>"
        f"<pre>{escape(options)}</pre></details></section>",
    )


def _setup(report: ReplayReport) -> str:
    pool = format_bytes(report.tiers[0].capacity_bytes or 0)
    behind = ", ".join(tier.name for tier in report.tiers[1:])
    return (
        f"{report.requests:,} requests of {report.chunks:,} chunks of "
        f"{format_bytes(report.chunk_bytes)}. Host pool: {pool}. "
        f"Tiers: {behind or 'none'}. Hit rate: {_percent(report.hit_rate)}, "
        f"{report.hit_chunks:,} of {report.chunks:,} chunks; {compared_line(report)}."
    )


def _origins(report: ReplayReport) -> str:
    origins = _sources(report)
    parts = "".join(
        f'<div style="flex:{of.chunks} 0 0;background:var(--{of.color})"></div>'
        for of in origins
        if of.chunks
    )
    names = legend(
        (of.color, f"{of.name} {_percent(of.chunks / max(1, report.chunks))}, {of.chunks:,} chunks")
        for of in origins
    )
    return (
        "<section><h2>Where the chunks came from</h2>"
        f'<div class="share">{parts}</div>{names}</section>'
    )


class _Source(NamedTuple):
    name: str
    color: str
    chunks: int


def _sources(report: ReplayReport) -> list[_Source]:
    names = ["host pool", *(tier.name for tier in report.tiers[1:])]
    colors = chain(["host"], cycle(_TIER_COLORS))
    hits = map(sum, report.history.hits)
    found = [_Source(*of) for of in zip(names, colors, hits, strict=False)]
    return [*found, _Source("computed", "computed", report.chunks - report.hit_chunks)]


def _charts(report: ReplayReport) -> list[Chart]:
    history = report.history
    ends = Counter(history.chunks)
    shorter = accumulate(ends[depth] for depth in range(max(ends, default=0)))
    named_at = [len(history.chunks) - count for count in shorter]
    time = ("Hit rate over time", "the requests of a column name", "requests, in order of arrival")
    depth = (
        "Hit rate by depth in the prompt",
        "lie as far from the start of a prompt",
        "chunks from the start of the prompt",
    )
    return [
        _hit_rates(report, (*time, "request"), _MOST_COLUMNS, history.hits, history.chunks),
        _hit_rates(report, (*depth, "chunk"), _MOST_DEPTHS, history.hits_at, named_at),
        _waits(report),
    ]


def _hit_rates(
    report: ReplayReport,
    texts: tuple[str, str, str, str],
    most: int,
    hits: Iterable[Sequence[int]],
    named: Sequence[int],
) -> Chart:
    title, note, unit, word = texts
    width = max(1, -(-len(named) // most))
    starts = range(0, len(named), width)
    totals = [max(1, total) for total in _sums(named, width)]
    return Chart(
        kind="columns",
        title=title,
        note=f"Chunks found, as a share of those that {note}.",
        unit=unit,
        heads=[_span(word, start, min(start + width, len(named))) for start in starts],
        labels=[f"{start + 1:,}" for start in starts],
        series=[
            Series(of.name, of.color, list(map(truediv, _sums(found, width), totals)))
            for of, found in zip(_sources(report)[:-1], hits, strict=True)
        ],
        text=_percent,
        top=1.0,
    )


def _waits(report: ReplayReport) -> Chart:
    waits_s = sorted(report.history.wait_s)
    edges = _decades(waits_s[0], waits_s[-1])
    bounds = list(pairwise(edges))
    below = [0, *(bisect_left(waits_s, edge) for edge in edges[1:])]
    counts = [end - start for start, end in pairwise(below)]
    return Chart(
        kind="columns",
        title="How long requests waited",
        note="From a request's first lookup until all that it found was in host memory.",
        unit="wait",
        heads=[f"{format_seconds(start)} to {format_seconds(end)}" for start, end in bounds],
        labels=[format_seconds(start) for start, _ in bounds],
        series=[Series("requests", "host", counts)],
        text="{:,.0f}".format,
    )


def _span(word: str, start: int, end: int) -> str:
    one = end - start == 1
    return f"{word} {end:,}" if one else f"{word}s {start + 1:,} to {end:,}"


def _sums(values: Sequence[int], width: int) -> list[int]:
    return [sum(values[start : start + width]) for start in range(0, len(values), width)]


def _decades(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten, from below ``least`` to above ``most``."""
    # Replace 0, which has no logarithm. Durations are 0 if a virtual clock did not move.
    least, most = max(least, 1e-6), max(most, 1e-6)
    first, last = (math.floor(math.log10(of)) for of in (least, most))
    edges = [step * 10.0**decade for decade in range(first, last + 2) for step in (1, 2, 5)]
    return edges[max(0, bisect_right(edges, least) - 1) : bisect_right(edges, most) + 1]
