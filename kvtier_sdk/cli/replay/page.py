"""Writes a self-contained HTML page about a replay, with figures, charts and tables."""

from __future__ import annotations

from html import escape

from kvtier_sdk.cli.drawing import document, figure, legend, table
from kvtier_sdk.cli.replay import ReplayReport
from kvtier_sdk.cli.replay.charts import charts, percent, sources, waits
from kvtier_sdk.cli.replay.sessions import percentile
from kvtier_sdk.cli.replay.view import compared_line, sections, troubles
from kvtier_sdk.options.units import format_bytes, format_seconds


def replay_page(report: ReplayReport, workload: str, concurrency: int, options: str) -> str:
    figures = "".join(map(figure, charts(report)))
    tables = "".join(
        f"<section><h2>{part.title}</h2><p>{escape(part.text)}</p>{table(*part.rows)}"
        f"<p>{escape(part.note)}</p></section>"
        for part in sections(report, overlapped=concurrency > 1)
    )
    return document(
        f"kvtier replay: {workload}",
        f"<header><h1>Replay of {escape(workload)}</h1>"
        f'<p class="dim">{escape(_setup(report, concurrency))}</p></header>'
        f"{_complaints(report)}{_origins(report)}"
        f'<main class="charts">{figures}</main>{tables}'
        f"<section><h2>Waits</h2>{_wait_table(report)}</section>"
        "<section><details><summary>The configuration that was played</summary>"
        f"<pre>{escape(options)}</pre></details></section>",
    )


def _setup(report: ReplayReport, concurrency: int) -> str:
    pool = format_bytes(report.tiers[0].capacity_bytes or 0)
    behind = ", ".join(tier.name for tier in report.tiers[1:])
    at_once = f"{concurrency:,} requests" if concurrency > 1 else "one request"
    return (
        f"{report.requests:,} requests of {report.chunks:,} chunks of "
        f"{format_bytes(report.chunk_bytes)}, {at_once} at a time. Host pool: {pool}. "
        f"Tiers: {behind or 'none'}. Hit rate: {percent(report.hit_rate)}, "
        f"{report.hit_chunks:,} of {report.chunks:,} chunks; {compared_line(report)}."
    )


def _complaints(report: ReplayReport) -> str:
    wrong = [compared_line(report)] if report.wrong_bytes else []
    lines = [*wrong, *troubles(report)]
    return "".join(f'<p class="bad">{escape(line)}</p>' for line in lines)


def _origins(report: ReplayReport) -> str:
    origins = sources(report)
    parts = "".join(
        f'<div style="flex:{of.chunks} 0 0;background:var(--{of.color})"></div>'
        for of in origins
        if of.chunks
    )
    names = legend(
        (of.color, f"{of.name} {percent(of.chunks / max(1, report.chunks))}, {of.chunks:,} chunks")
        for of in origins
    )
    return (
        "<section><h2>Where the chunks came from</h2>"
        f'<div class="share">{parts}</div>{names}</section>'
    )


def _wait_table(report: ReplayReport) -> str:
    columns = ["requests", "number", "p50", "p90", "p99", "longest"]
    rows = []
    for of in waits(report):
        ordered = of.values
        marks = [percentile(ordered, share) for share in (50, 90, 99)]
        rows.append([of.name, f"{len(ordered):,}", *map(format_seconds, [*marks, ordered[-1]])])
    return table(columns, *rows)
