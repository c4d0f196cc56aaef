"""Compares an engine's counters with the forecast for the requests that the engine recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier_sdk.cli.engine import ask_engine
from kvtier_sdk.cli.plan.prices import DAY_S, Work
from kvtier_sdk.cli.plan.traffic import Traffic, Window
from kvtier_sdk.cli.replay import ReplayRequest
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.options.units import format_bytes

TITLES = ("tier", "forecast", "hits", "points", "forecast/day", "written/day", "bytes")

# A plan holds up to these deviations: points of a hit rate, and a share of the forecast bytes.
_MOST_POINTS_OFF, _MOST_BYTES_OFF = 1.0, 0.1
# The request counts may differ by this share: some requests end after the trace was read.
_MOST_REQUESTS_OFF = 0.01
_LOSSES = ("dropped", "failures", "misses")


class Row(NamedTuple):
    name: str
    forecast_hit_rate: float
    hit_rate: float
    forecast_written_bytes: float = 0.0
    written_bytes: float = 0.0

    @property
    def points(self) -> float:
        return 100 * (self.hit_rate - self.forecast_hit_rate)

    @property
    def bytes_off(self) -> float:
        expected = self.forecast_written_bytes
        return self.written_bytes / expected - 1 if expected else 0.0

    def cells(self) -> tuple[str, ...]:
        written = self.forecast_written_bytes, self.written_bytes
        return (
            self.name,
            *(f"{rate:.1%}" for rate in (self.forecast_hit_rate, self.hit_rate)),
            f"{self.points:+.1f}",
            *("-" if self.name == PRIMARY else format_bytes(of) for of in written),
            "-" if self.name == PRIMARY else f"{self.bytes_off:+.1%}",
        )


class Comparison(NamedTuple):
    """The compared tiers, and the number of chunks lost for each reason."""

    rows: Sequence[Row]
    lost: Mapping[str, float]

    def furthest(self) -> tuple[float, str]:
        """Return the largest ratio of a deviation to its tolerance, and this deviation in words."""
        off = {}
        for of in self.rows:
            off[f"hits of {of.name}, {of.points:+.1f} points"] = of.points / _MOST_POINTS_OFF
            off[f"bytes written to {of.name}, {of.bytes_off:+.1%}"] = of.bytes_off / _MOST_BYTES_OFF
        return max((abs(value), words) for words, value in off.items())

    def verdict(self) -> str:
        deviation, name = self.furthest()
        if deviation <= 1:
            return "The plan holds: hits are within 1 point of the forecast, bytes within 10 %."
        verdict = f"The plan does not hold. Furthest from the forecast: {name}"
        if self.lost:
            reason = max(self.lost, key=self.lost.__getitem__)
            verdict += f". Most lost chunks: {reason} ({self.lost[reason]:,.0f})"
        return f"{verdict}."

    def as_json(self) -> dict[str, Any]:
        rows = [of._asdict() for of in self.rows]
        return {"tiers": rows, "lost": self.lost, "holds": bool(self.furthest()[0] <= 1)}


def compared(workload: Sequence[ReplayRequest], policy: str, socket: Path) -> Comparison:
    """Compare an engine's counters with a simulation of the requests that the engine recorded."""
    status = ask_engine(socket, command="status")
    recorded = status["trace"] and status["trace"]["written_requests"]
    if recorded is not None and abs(recorded - len(workload)) > _MOST_REQUESTS_OFF * len(workload):
        raise _other_time(socket, f"{recorded:,} requests", f"{len(workload):,}")
    host, tiers = status["host"], status["tiers"]
    if len(tiers) > 1:
        raise ConfigError(f"--compare {socket}: a plan has one tier; this engine has several")
    days = Work.of(workload, 0, 0.0, 1.0).span_s / DAY_S
    traffic = Traffic(workload)
    # kvtier does not count hits on the device. The pool's hit rate below includes these hits.
    absent = host["stored_chunks"] + sum(of["hit_chunks"] for of in tiers)
    if not host["stored_chunks"] or absent > traffic.chunks:
        raise _other_time(socket, f"{absent:,.0f} chunks", f"{traffic.chunks:,}")
    # A tier without stores shows no compression ratio, so assume that it does not compress.
    room, chunk_bytes = 0, host["stored_bytes"] / host["stored_chunks"]
    for of in tiers:
        if of["stored_chunks"]:
            chunk_bytes = of["stored_object_bytes"] / of["stored_chunks"]
        capacity_bytes = of.get("capacity_bytes")
        room = int(capacity_bytes / chunk_bytes) if capacity_bytes else traffic.distinct_chunks
    flow = traffic.flow(policy, status["pool"]["slots"], room, Window())
    rows = [Row(PRIMARY, flow.pool_hits / flow.asked, 1 - absent / flow.asked)]
    for of in tiers:
        hits = flow.tier_hits / flow.asked, of["hit_chunks"] / flow.asked
        written = flow.stored * chunk_bytes / days, of["stored_object_bytes"] / days
        rows.append(Row(of["name"], *hits, *written))
    lost: dict[str, float] = {}
    for of in (host, *tiers):
        counts = {f"{kind} {reason}": n for kind in _LOSSES for reason, n in of[kind].items()}
        counts.pop("misses absent", None)
        counts["not_admitted_chunks"] = of["not_admitted_chunks"]
        lost |= {f"{of['name']} {reason}": chunks for reason, chunks in counts.items() if chunks}
    return Comparison(rows, lost)


def _other_time(socket: Path, counted: str, recorded: str) -> ConfigError:
    return ConfigError(
        f"--compare {socket}: the engine has counted {counted}, and --trace has {recorded}; give "
        "its whole recording, from its start until now, and no other"
    )
