"""Alert rules for Prometheus and a dashboard for Grafana, made from the table of metrics.

An expression names a metric by the field that counts it, ``$reads_open``: one that is renamed or
gone fails when this module is used, and not in an operator's monitoring.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from kvtier_sdk.metrics import METRICS_BY_FIELD, Metric, MetricKind

_NAMES = {name: metric.name for name, metric in METRICS_BY_FIELD.items()}


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: its name.
        severity: ``warning``, or ``info`` for what wastes work and loses none.
        expression: is true while something is wrong.
        for_s: how long it has to be true before the alert fires.
        window_s: the stretch of time over which it looks, where it does; ``$window`` in it.
        summary: what is wrong.
        advice: what to do.
    """

    name: str
    severity: str
    expression: str
    for_s: int
    window_s: int
    summary: str
    advice: str

    def promql(self, scale: float = 1.0) -> str:
        """Return the expression in Prometheus's language.

        Args:
            scale: shortens the window, for tests.
        """
        window = duration(self.window_s * scale)
        return Template(self.expression).substitute(_NAMES, window=window)


_TIER = "tier {{ $labels.tier }} on {{ $labels.instance }}"

ALERTS: Sequence[Alert] = (
    Alert(
        "KVTierReadsSuspended",
        "warning",
        "$reads_open == 1 and $is_open == 1",
        120,
        0,
        f"Nothing is read from {_TIER}",
        "The store is down, hangs or refuses: the engine's log names the last failure, and "
        "'kvtier check URL' tries it. Requests go on and recompute what the tier has. It is used "
        "again by itself once it answers.",
    ),
    Alert(
        "KVTierStoresSuspended",
        "warning",
        "$stores_open == 1 unless $reads_open == 1",
        120,
        0,
        f"Nothing is written to {_TIER}, which can be read",
        "The store is full or read-only: look at its disk or its memory limit.",
    ),
    Alert(
        "KVTierSlow",
        "warning",
        "avg_over_time($is_slow[$window]) > 0.2",
        0,
        300,
        f"Loads and stores hang: {_TIER}",
        "For a minute of the last five no call of the tier made progress: the store hangs, or is "
        "overloaded. Stores are dropped meanwhile, and loads are misses at 'load_deadline'.",
    ),
    Alert(
        "KVTierErrors",
        "warning",
        'sum without (reason) (rate($failures{reason!~"not_found|cancelled"}[$window]))'
        " > 0.01 * rate(${job_chunks}_sum[$window])",
        300,
        300,
        f"More than 1 % of the chunks fail: {_TIER}, {{{{ $labels.operation }}}}",
        "The label 'reason' of kvtier_failed_chunks_total says why. For 'timeout', the tier is "
        "slower than its deadline: raise the deadline, or give it less work.",
    ),
    Alert(
        "KVTierDamagedChunks",
        "warning",
        'increase($failures{reason=~"corrupt|auth"}[$window]) > 0',
        0,
        3600,
        f"Chunks did not pass their check, or the store refused: {_TIER}",
        "'corrupt': the store or the network damages data, or another program writes there; no "
        "damaged chunk was used. 'auth': wrong credentials, or engines with different key files.",
    ),
    Alert(
        "KVTierHitRateCollapsed",
        "warning",
        "(sum without (tier) (rate($hit_chunks[$window]))"
        " / (sum without (tier) (rate($hit_chunks[$window]))"
        " + sum without (tier, reason) (rate($misses[$window]))))"
        " < 0.5 * (sum without (tier) (rate($hit_chunks[1d]))"
        " / (sum without (tier) (rate($hit_chunks[1d]))"
        " + sum without (tier, reason) (rate($misses[1d]))))",
        900,
        1800,
        "The hit rate on {{ $labels.instance }} is less than half of the last day's",
        "The label 'reason' of kvtier_misses_total says why. 'absent' after a change of model, "
        "release or options: another namespace, and the tiers fill again; else they are too small.",
    ),
    Alert(
        "KVTierPoolFull",
        "warning",
        "$pool_pinned + $pool_writing + $pool_loading + $pool_quarantined > 0.9 * $pool_slots",
        300,
        0,
        "Over 90 % of the host pool on {{ $labels.instance }} are in use and cannot be evicted",
        "New chunks are not stored meanwhile. Enlarge the host pool; if most are quarantined, a "
        "tier hangs; if most are pinned, a tier stores more slowly than the engine computes.",
    ),
    Alert(
        "KVTierQueueFull",
        "info",
        'sum without (operation, reason) (rate($dropped{reason="queue_full"}[$window]))'
        " > 0.1 * rate($stored_chunks[$window])",
        900,
        900,
        f"Chunks find the queue full: {_TIER}",
        "The tier is slower than the engine: raise 'max_queue' for bursts, or "
        "'concurrency', or give it less with store_policy 'after_hits:2'.",
    ),
    Alert(
        "KVTierEvictedUnread",
        "info",
        "rate($evicted_unread_chunks[$window]) > 0.8 * rate($evicted_chunks[$window])",
        3600,
        3600,
        f"Four of five chunks leave unread: {_TIER}",
        "The tier is too small for its traffic, or its chunks are never asked for again: enlarge "
        "it, or give it less with store_policy 'after_hits:2'.",
    ),
    Alert(
        "KVTierSelective",
        "info",
        "$is_selective == 1",
        3600,
        3600,
        f"It is full and refuses chunks that come for the first time: {_TIER}",
        "Chunks would leave before they are read: enlarge the tier, or leave it so; "
        "'admission=off' gives it every chunk.",
    ),
    Alert(
        "KVTierProcessRestarts",
        "warning",
        "increase($restarts[$window]) > 2",
        0,
        1800,
        f"The process has died more than twice in half an hour: {_TIER}",
        "The engine's log has its last words, under kvtier.tier and the tier's name.",
    ),
    Alert(
        "KVTierNotOpen",
        "warning",
        "$is_open == 0",
        300,
        0,
        f"It could not be opened: {_TIER}",
        "The store could not be reached when the engine started, or its process died; the log has "
        "the reason, and kvtier_open_failures_total counts the attempts.",
    ),
)


def alert_rules(*, scale: float = 1.0, for_s: float | None = None) -> str:
    """Return a file of rules for Prometheus, in YAML.

    Args:
        scale: shortens each alert's window, for tests.
        for_s: how long each has to be true, instead of its own.
    """
    lines = ["# Made by 'kvtier metrics rules'.", "groups:", "- name: kvtier", "  rules:"]
    for alert in ALERTS:
        wait = duration(alert.for_s if for_s is None else for_s)
        lines += [
            f"  - alert: {alert.name}",
            f"    expr: '{alert.promql(scale)}'",
            f"    for: {wait}",
            "    labels:",
            f"      severity: {alert.severity}",
            "    annotations:",
            f"      summary: {json.dumps(alert.summary)}",
            f"      description: {json.dumps(alert.advice)}",
        ]
    return "\n".join(lines) + "\n"


def duration(seconds: float) -> str:
    """Write a duration as Prometheus does."""
    return f"{round(seconds * 1000)}ms" if seconds % 1 else f"{round(seconds)}s"


# --- the dashboard --------------------------------------------------------------------------------

#: Panels that relate several metrics: title, unit, and an expression and its legend for each line.
_OVERVIEW: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    (
        "Hit rate of the chunks that requests ask for",
        "percentunit",
        [
            (
                "sum(rate($hit_chunks{$filter}[$interval])) / (sum(rate($hit_chunks{$filter}"
                "[$interval])) + sum(rate($misses{$filter}[$interval])))",
                "hits",
            )
        ],
    ),
    (
        "Hits by tier, misses by reason",
        "chunks/s",
        [
            ("sum by (tier) (rate($hit_chunks{$filter}[$interval]))", "hit in {{tier}}"),
            ("sum by (reason) (rate($misses{$filter}[$interval]))", "miss: {{reason}}"),
        ],
    ),
    (
        "Suspended tiers",
        "short",
        [
            ("max by (instance, tier) ($reads_open{$filter})", "reads: {{tier}} {{instance}}"),
            ("max by (instance, tier) ($stores_open{$filter})", "stores: {{tier}} {{instance}}"),
        ],
    ),
    (
        "Fill",
        "percentunit",
        [
            (
                "max by (instance, tier) ($used_bytes{$filter} / $capacity_bytes{$filter})",
                "{{tier}} {{instance}}",
            )
        ],
    ),
)

_UNITS = {"bytes": "bytes", "seconds": "s"}


def dashboard() -> str:
    """Return a dashboard for Grafana, in JSON: an overview, and a panel for each metric."""
    panels: list[dict[str, Any]] = []
    rows = (
        ("Overview", list(_overview())),
        ("Tiers", [_panel_of(m) for m in METRICS_BY_FIELD.values() if m.labels]),
        ("Host pool", [_panel_of(m) for m in METRICS_BY_FIELD.values() if not m.labels]),
    )
    at = 0
    for title, row in rows:
        place = {"x": 0, "y": at, "w": 24, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        at += 1
        for index, panel in enumerate(row):
            panel["gridPos"] = {"x": index % 3 * 8, "y": at + index // 3 * 8, "w": 8, "h": 8}
            panels.append(panel)
        at += (len(row) + 2) // 3 * 8
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return json.dumps(
        {
            "uid": "kvtier",
            "title": "kvtier",
            "tags": ["kvtier"],
            "schemaVersion": 38,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "templating": {
                "list": [
                    {
                        "name": "datasource",
                        "label": "Prometheus",
                        "type": "datasource",
                        "query": "prometheus",
                    },
                    {
                        "name": "instance",
                        "label": "Engine",
                        "type": "query",
                        "datasource": _SOURCE,
                        "query": f"label_values({_NAMES['build']}, instance)",
                        "includeAll": True,
                        "multi": True,
                        "refresh": 2,
                    },
                ]
            },
            "panels": panels,
        },
        indent=1,
    )


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _overview() -> Iterator[dict[str, Any]]:
    for title, unit, lines in _OVERVIEW:
        yield _panel(title, "", unit, lines)


def _panel_of(metric: Metric) -> dict[str, Any]:
    """Make the panel of a metric, by its kind."""
    name = metric.name.removeprefix("kvtier_").removesuffix("_total").replace("_", " ")
    unit = _UNITS.get(metric.unit, "short")
    labels = metric.labels or ("job",)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    by = ", ".join(labels)
    if metric.kind is MetricKind.COUNTER:
        lines = [(f"sum by ({by}) (rate({metric.name}{{$filter}}[$interval])) > 0", legend)]
        unit = "Bps" if unit == "bytes" else unit
        name += " per second"
    elif metric.kind is MetricKind.HISTOGRAM:
        rate = f"sum by ({by}, le) (rate({metric.name}_bucket{{$filter}}[$interval]))"
        lines = [
            (f"histogram_quantile({quantile}, {rate})", f"p{quantile * 100:g} {legend}")
            for quantile in (0.5, 0.99)
        ]
    else:
        of_each = f"max by (instance, {by}) ({metric.name}{{$filter}})"
        lines = [(of_each, f"{legend} {{{{instance}}}}")]
    return _panel(name, metric.help, unit, lines)


def _panel(
    title: str, help_text: str, unit: str, lines: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    in_grafana = {"filter": 'instance=~"$instance"', "interval": "$__rate_interval"}
    return {
        "type": "timeseries",
        "title": title,
        "description": help_text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": Template(expression).substitute(_NAMES, **in_grafana),
                "legendFormat": legend,
                "datasource": _SOURCE,
            }
            for index, (expression, legend) in enumerate(lines)
        ],
    }
