"""The README and ``docs/afternoon.md`` show the output of ``demo.py`` and ``afternoon.py``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.author import ROOT, run

pytestmark = pytest.mark.reader

README = ROOT / "README.md"
KVTIER = str(Path(sys.executable).with_name("kvtier"))

#: Output that differs from run to run: paths, durations and throughput.
_VARYING = re.compile(
    r"\S*(/kvtier-demo-)\w+|\S*bin/(?=kvtier )|\d+\.\d\d(?= |$)|\d+\.\d(?= u?s\b)"
)
#: The counts by tier vary too, because a prompt's chunks arrive in several parts, and either tier
#: may serve a hit.
_BY_TIER = re.compile(
    r"(?<=^host) [\d,]+ \S+%|(?<=^file) [\d,]+ \S+%|(?<=- )[\d,]+$|[\d.]+ \w+(?= 0$)"
    r"|[\d,]+(?= in the files)"
)


def demo(*arguments: str) -> str:
    return run([sys.executable, "examples/demo.py", *arguments], ROOT)


def plain(printed: str) -> list[str]:
    lines = (" ".join(_VARYING.sub(r"\1", line).split()) for line in printed.splitlines())
    return [_BY_TIER.sub("", line) for line in lines if line]


def told(text: str) -> list[str]:
    return re.findall(r"^(?:(?:## |\$ kvtier |NOT SO).*|[A-Z][^:\n]*\.)$", text, re.MULTILINE)


def test_the_afternoon_is_as_its_page_says() -> None:
    page = (ROOT / "docs" / "afternoon.md").read_text()
    printed = run([sys.executable, "examples/afternoon.py"], ROOT)
    assert told(page[page.index("\n## ") :]) == told(printed)


def test_the_last_sentence_says_what_the_second_report_says(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [[0, 1, 2], [0, 1, 3, 4], [0, 1, 2, 5], [6]]
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in prompts))
    sentence = demo(str(trace)).splitlines()[-1]
    command = [KVTIER, "replay", "--json", "--trace", str(trace), "--chunk-bytes", "4KiB"]
    command += ["--tier", f"file://{tmp_path}/kv", "--report", str(tmp_path / "report.json")]
    subprocess.run(command, capture_output=True, check=True)
    second = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "report.json").read_text() == second
    report = json.loads(second)
    assert report["blocks"] == report["hit_blocks"] == 12
    assert [tier["hit_blocks"] for tier in report["tiers"]] == [5, 7]
    assert report["compared_bytes"] == 12 * 4096 == 12 * report["block_bytes"]
    assert re.findall(r"[\d,]*\d", sentence) == ["12", f"{12 * 512:,}", "7", "49,152"]
    assert "all 12 chunks" in sentence


def test_the_readme_shows_what_is_printed() -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert plain(shown) == plain(demo())


def test_what_was_not_found_again_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from demo import summary

    tiers = [{"hit_blocks": 2}, {"hit_blocks": 5}]
    report = {"blocks": 12, "hit_blocks": 7, "compared_bytes": 7 * 4096, "tiers": tiers}
    said = summary(report, 16)
    assert "found 7 of 12 chunks of its prompts, 112 tokens' worth: 5 in the files" in said
