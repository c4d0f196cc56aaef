"""``kvtier metrics``: lists the metrics, and prints alert rules and a dashboard."""

from __future__ import annotations

from pathlib import Path

import typer

from kvtier_sdk.metrics import METRICS

metrics_app = typer.Typer(
    no_args_is_help=True, help="List metrics; print alert rules, a dashboard."
)


@metrics_app.command("list")
def list_command() -> None:
    """List every metric with its name, kind, labels and meaning."""
    for metric in METRICS:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        unit = f" of {metric.unit}" if metric.unit else ""
        print(f"{metric.name}{labels}  ({metric.kind.value}{unit})\n    {metric.help}")


@metrics_app.command("rules")
def rules_command() -> None:
    """Print alert rules in YAML, for a file that Prometheus names under 'rule_files'."""
    _print("alert_rules.yml")


@metrics_app.command("dashboard")
def dashboard_command() -> None:
    """Print a dashboard in JSON, to import into Grafana."""
    _print("dashboard.json")


def _print(file: str) -> None:
    print(Path(__file__).with_name(file).read_text(), end="")
