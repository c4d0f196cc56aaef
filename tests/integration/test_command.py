from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import kvtier
from support.monitoring import ALERT_RULES

from kvtier_sdk import METRICS

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
COMMAND = [sys.executable, "-P", "-c", "from kvtier_sdk.cli import main; main()"]


def test_a_backends_bug_is_told_without_secrets(faulty_site: Path) -> None:
    done = kvtier("replay", "--tier", "clumsy:", PYTHONPATH=str(faulty_site))
    assert (done.returncode, done.stdout) == (1, "")
    warning, told, _ = done.stderr.splitlines()
    assert TIME.sub("TIME", warning) == "WARNING TIME [kvtier.tier.clumsy] mind //ada:***@host"
    assert told == "kvtier: clumsy open: raised LookupError: no //ada:***@host"


_BROKEN = """
from kvtier_sdk.cli.replay import command
command.read_trace = lambda path: {}["redis://ada:hunter2@host"]
from kvtier_sdk.cli import main
main()
"""


@pytest.mark.parametrize("asked", [{}, {"KVTIER_TRACEBACK": "1"}], ids=["told", "traceback"])
def test_an_unexpected_error_is_a_line_without_secrets(asked: dict[str, str]) -> None:
    broken = [sys.executable, "-P", "-c", _BROKEN, "replay", "--trace", "chats.jsonl"]
    done = subprocess.run(broken, env=os.environ | asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    *shown, told = done.stderr.splitlines()
    assert told == (
        "kvtier: unexpected KeyError: 'redis://ada:***@host'; set KVTIER_TRACEBACK=1 in the "
        "environment to see a traceback"
    )
    assert shown[:1] == (["Traceback (most recent call last):"] if asked else [])
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["redis://u:hunter2@h"],
        ["--requests", "redis://u:hunter2@h"],
        ["--policy", "redis://u:hunter2@h"],
        ["--report", "redis://u:hunter2@h/0"],
        ["--tier", "redis://u:hunter2@h:x"],
        ["--tier", "memory:?password=hunter2&q=hunter2"],
        ["--config", "redis://u:hunter2@h"],
        ["--trace", "redis://u:hunter2@h"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_show_no_password(arguments: list[str]) -> None:
    done = kvtier("replay", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("command", [["replay"], ["replay", "--json"], ["check"]])
def test_a_tier_out_of_reach_is_status_1_with_advice_everywhere(
    command: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "kv.toml"
    config.write_text('slots = 4\ntiers = ["redis://127.0.0.1:1"]\n')
    given = ["--config", str(config)] if command[0] == "replay" else [str(config)]
    done = kvtier(*command, *given)
    assert done.returncode == 1, done.stderr
    said = done.stderr if command[0] == "replay" else done.stdout
    assert "redis open: no connection to 127.0.0.1:1: Connection refused; see that" in said
    assert "\n  what to do: see that the store runs, that its address is right" in said


def test_each_command_for_metrics_prints_what_it_names() -> None:
    listed = kvtier("metrics", "list")
    assert listed.returncode == 0
    assert all(f"{metric.name}" in listed.stdout for metric in METRICS)
    assert "kvtier_misses_total{tier, reason}  (counter of chunks)\n    Chunks" in listed.stdout
    rules = kvtier("metrics", "rules")
    assert (rules.returncode, rules.stdout, rules.stderr) == (0, ALERT_RULES, "")
    dashboard = kvtier("metrics", "dashboard")
    assert json.loads(dashboard.stdout)["title"] == "kvtier"
