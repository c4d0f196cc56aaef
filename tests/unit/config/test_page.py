from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.author import run
from support.monitoring import ALERTS

from kvtier_sdk import METRICS, RunnerOptions, TieringConfig, load_backend
from kvtier_sdk.cli.option_table import OptionInfo, describe_options
from kvtier_sdk.engine import AdapterOptions, MissReason
from kvtier_sdk.runner.jobs import Verdict
from kvtier_vllm.options import EngineOptions, GuestOptions

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = DOCS / "configuration.md"
METRICS_PAGE = DOCS / "metrics.md"
DOCUMENTED = {
    "TieringConfig": (PAGE, TieringConfig),
    "RunnerOptions": (PAGE, RunnerOptions),
    "memory": (PAGE, load_backend("memory").config_model),
    **{
        name: (ROOT / "backends" / name / "README.md", load_backend(name).config_model)
        for name in ("file", "redis", "s3", "mooncake")
    },
    "GuestOptions": (DOCS / "vllm.md", GuestOptions),
    "EngineOptions": (DOCS / "vllm.md", EngineOptions),
    "AdapterOptions": (DOCS / "engines.md", AdapterOptions),
}
Row = tuple[str, str, str]


def rows(text: str, name: str) -> list[Row]:
    _, _, rest = text.partition(f"<!-- options: {name} -->")
    lines = rest.strip().splitlines()
    table = lines[2 : next((n for n, line in enumerate(lines) if not line), len(lines))]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [(option.strip("`"), kind, default) for option, kind, default, _ in cells]


def written(option: OptionInfo) -> Row:
    kind = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind
    kind += ", live" * option.is_live
    return option.name, kind, "needed" if option.required else default(option.default)


def default(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, str):
        return f"`{value}`"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_page_says_what_the_code_does(name: str) -> None:
    page, model = DOCUMENTED[name]
    assert rows(page.read_text(), name) == list(map(written, describe_options(model)))


def test_every_metric_is_on_its_page() -> None:
    _, _, table = METRICS_PAGE.read_text().partition("<!-- metrics -->")
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `kvtier_")
    ]
    assert all(len(row) == 6 and row[5] for row in rows)
    assert [row[:5] for row in rows] == [
        [m.name, m.kind.value, m.unit, ", ".join(m.labels), m.help] for m in METRICS
    ]


def test_every_alert_and_every_reason_is_on_the_page_of_metrics() -> None:
    text = METRICS_PAGE.read_text()
    assert re.findall(r"^\| `(KVTier\w+)` \|", text, re.MULTILINE) == ALERTS
    _, _, rest = text.partition("### Misses by reason")
    misses, _, failures = rest.partition("### Failed chunks by reason")
    named = {part: re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) for part in (misses, failures)}
    assert set(named[misses]) == {reason.value for reason in MissReason}
    assert set(named[failures]) >= {v.value for v in Verdict if v is not Verdict.OK}


def test_the_example_prints_what_the_page_says() -> None:
    text = PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"^prints `(.*)`\.$", text, re.MULTILINE)
    assert run([sys.executable, "-c", example], ROOT).strip() == printed


def test_the_file_of_the_page_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "kv.toml"
    path.write_text(example)
    config = TieringConfig.from_file(path)
    assert [spec.name for spec in config.tiers] == ["file", "last"]
