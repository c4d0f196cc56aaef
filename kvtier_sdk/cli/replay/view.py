"""Prints a replay's report on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier_sdk.cli.replay.report import ReplayReport
from kvtier_sdk.cli.replay.sessions import SessionHits, percentile
from kvtier_sdk.cli.terminal import print_columns, say
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.options.units import format_bytes, format_seconds

_TITLES = ("tier", "hit chunks", "hit rate", "stored", "GB/s", "loaded", "GB/s", "evicted chunks")


class Section(NamedTuple):
    """A table for the terminal and the page. Columns from ``numbers_from`` on are numbers."""

    title: str
    text: str
    rows: Sequence[Sequence[str]]
    numbers_from: int = 1
    note: str = ""


def print_report(report: ReplayReport) -> None:
    say(
        f"{report.requests:,} requests, {report.chunks:,} chunks of "
        f"{format_bytes(report.chunk_bytes)}, {report.elapsed_s:.1f} s"
    )
    for part in sections(report):
        say(*filter(None, [part.text]))
        print_columns(part.rows, part.numbers_from)
        say(*filter(None, [part.note]))
    say(*troubles(report))
    say(f"dropped: {report.dropped:,} chunks")
    say(compared_line(report))


def compared_line(report: ReplayReport) -> str:
    wrong = f"{report.wrong_bytes:,} of them wrong" if report.wrong_bytes else "all equal"
    return f"compared with what was stored: {report.compared_bytes:,} bytes, {wrong}"


def sections(report: ReplayReport) -> Iterator[Section]:
    total = ("all", f"{report.hit_chunks:,}", f"{report.hit_rate:.2%}", *[""] * 5)
    rows = [_TITLES, *(_row(tier, report) for tier in report.tiers)]
    speed = "GB/s: bytes over the time that store or load jobs were under way"
    note = speed if len(report.tiers) > 1 else ""
    yield Section("Tiers", "", [*rows, total], note=note)
    if report.sessions is not None:
        yield _sessions(report.sessions)
    if any(report.saved_tokens):
        tiers = zip(report.tiers, report.saved_tokens, strict=True)
        rows = [(of.name, f"{tokens:,}", format_bytes(of.loaded_bytes)) for of, tokens in tiers]
        yield Section("Tokens saved", "", [("tier", "tokens not computed", "moved"), *rows])
    if report.recompute_s is not None:
        computing = f"{format_seconds(report.recompute_s)} of computing a chunk"
        saved = [
            (of.name, format_seconds(of.compute_s), format_seconds(of.load_s), _signed(of.saved_s))
            for of in report.time_saved
        ]
        titles = ("tier", "not computed", "loads took", "saved")
        yield Section("Time saved", f"time saved, at {computing}", [titles, *saved])


def troubles(report: ReplayReport) -> Iterator[str]:
    for tier in report.tiers:
        for what, chunks in (("failed", tier.failures), ("dropped", tier.dropped)):
            for reason, count in sorted(chunks.items()):
                yield f"{what}: {count:,} chunks, {tier.name} {reason}"
        for error in tier.errors:
            yield f"  {error}"


def _sessions(found: SessionHits) -> Section:
    low, median, high = (f"{percentile(found.hit_rates, of):.2%}" for of in (10, 50, 90))
    text = (
        f"{len(found.hit_rates):,} sessions, hit rate of a session: p10 {low}, median {median}, "
        f"p90 {high}; {found.hitless:,} of several requests hit nothing after the first"
    )
    rows = [("turns after", "earlier prefix", "turns", "hit rate", "median wait")]
    for of in found.turns:
        prefix = "whole" if of.whole_prefix else "lost some"
        wait = format_seconds(of.median_wait_s)
        rows.append((of.after or "-", prefix, f"{of.turns:,}", f"{of.hit_rate:.2%}", wait))
    return Section("Sessions", text, rows, 2)


def _signed(duration_s: float) -> str:
    return f"{'-' if duration_s < 0 else ''}{format_seconds(abs(duration_s))}"


def _row(tier: TierStats, report: ReplayReport) -> list[str]:
    row = [tier.name, f"{tier.hit_chunks:,}", f"{tier.hit_chunks / max(1, report.chunks):.2%}"]
    for size_bytes, job in ((tier.stored_bytes, "store"), (tier.loaded_bytes, "load")):
        # Overlapping jobs can add up to more time than the run, so limit the sum to the run's time.
        duration_s = min(tier.job_s[job].total, report.elapsed_s)
        speed = f"{size_bytes / duration_s / 1e9:.2f}" if duration_s else "-"
        row += format_bytes(size_bytes), speed
    return [*row, f"{tier.evicted_chunks:,}"]
