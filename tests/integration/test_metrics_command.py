"""``kvtier metrics``. What it prints is checked in ``test_monitoring``."""

from __future__ import annotations

import json

from support.command import kvtier
from support.monitoring import ALERT_RULES

from kvtier_sdk import METRICS


def test_each_command_prints_what_it_names() -> None:
    listed = kvtier("metrics", "list")
    assert listed.returncode == 0
    assert all(f"{metric.name}" in listed.stdout for metric in METRICS)
    assert "kvtier_misses_total{tier, reason}  (counter of chunks)\n    Chunks" in listed.stdout
    rules = kvtier("metrics", "rules")
    assert (rules.returncode, rules.stdout, rules.stderr) == (0, ALERT_RULES, "")
    dashboard = kvtier("metrics", "dashboard")
    assert json.loads(dashboard.stdout)["title"] == "kvtier"
