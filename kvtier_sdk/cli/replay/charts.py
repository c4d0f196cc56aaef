"""Computes the data for the charts on a replay's page."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, cycle, pairwise
from operator import truediv
from typing import NamedTuple

from kvtier_sdk.cli.drawing import Chart, Series
from kvtier_sdk.cli.replay import ReplayReport
from kvtier_sdk.options.units import format_seconds

#: A chart has at most this many columns. For a longer trace, a column covers several requests.
_MOST_COLUMNS = 100
_MOST_DEPTHS = 40
_TIER_COLORS = ("tier1", "tier2", "tier3")
_count = "{:,.0f}".format
percent = "{:.1%}".format


class Source(NamedTuple):
    """An origin of chunks: the host pool, a tier, or the engine's computation."""

    name: str
    color: str
    chunks: int


def sources(report: ReplayReport) -> list[Source]:
    """Return all origins of chunks: the host pool, the tiers in order, and then the engine."""
    names = ["host pool", *(tier.name for tier in report.tiers[1:])]
    colors = chain(["host"], cycle(_TIER_COLORS))
    hits = map(sum, report.history.hits)
    found = [Source(*of) for of in zip(names, colors, hits, strict=False)]
    return [*found, Source("computed", "computed", report.chunks - report.hit_chunks)]


def charts(report: ReplayReport) -> list[Chart]:
    history = report.history
    ends = [0] * (max(history.chunks, default=0) + 1)
    for chunks in history.chunks:
        ends[chunks] += 1
    named_at = [len(history.chunks) - shorter for shorter in accumulate(ends[:-1])]
    time = ("Hit rate over time", "the requests of a column name", "requests, in order of arrival")
    depth = (
        "Hit rate by depth in the prompt",
        "lie as far from the start of a prompt",
        "chunks from the start of the prompt",
    )
    return [
        _hit_rates(report, *time, "request", _MOST_COLUMNS, history.hits, history.chunks),
        _hit_rates(report, *depth, "chunk", _MOST_DEPTHS, history.hits_at, named_at),
        _waits(report),
    ]


def waits(report: ReplayReport) -> list[Series]:
    """Return the requests' sorted waits, grouped by the last tier that served each request."""
    *found, computed = sources(report)
    kinds = [("nothing found", computed.color), ("host pool only", "host")]
    kinds += [(f"from {of.name} too", of.color) for of in found[1:]]
    waited: list[list[float]] = [[] for _ in kinds]
    history = report.history
    for wait_s, *hits in zip(history.wait_s, *history.hits, strict=True):
        last = max((at for at, chunks in enumerate(hits, 1) if chunks), default=0)
        waited[last].append(wait_s)
    named = zip(kinds, waited, strict=True)
    return [Series(*kind, sorted(waits_s)) for kind, waits_s in named if waits_s]


def _hit_rates(
    report: ReplayReport,
    title: str,
    note: str,
    unit: str,
    word: str,
    most: int,
    hits: Iterable[Sequence[int]],
    named: Sequence[int],
) -> Chart:
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
            for of, found in zip(sources(report)[:-1], hits, strict=True)
        ],
        text=percent,
        top=1.0,
    )


def _waits(report: ReplayReport) -> Chart:
    kinds = waits(report)
    edges = _decades(min(of.values[0] for of in kinds), max(of.values[-1] for of in kinds))
    bounds = list(pairwise(edges))
    series = []
    for of in kinds:
        below = [0, *(bisect_left(of.values, edge) for edge in edges[1:])]
        series.append(Series(of.name, of.color, [end - start for start, end in pairwise(below)]))
    return Chart(
        kind="columns",
        title="How long requests waited",
        note="From a request's first lookup until all that it found was in host memory.",
        unit="wait",
        heads=[f"{format_seconds(start)} to {format_seconds(end)}" for start, end in bounds],
        labels=[format_seconds(start) for start, _ in bounds],
        series=series,
        text=_count,
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
