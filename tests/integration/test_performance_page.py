from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

report: Any = importlib.import_module("report")
results: Any = importlib.import_module("results")
plots: Any = importlib.import_module("performance.plots")

_MACHINE = dict.fromkeys(("CPU", "memory", "kernel", "disk", "software", "other programs"), "x")
_VLLM = "vllm.fs_io_C"


def test_the_page_has_the_kept_figures_and_no_others() -> None:
    page = (report.DOCS / "performance.md").read_text()
    figures = report.read_figures(report.DOCS)
    assert page == report.page.page(figures), "run make bench BENCH=--write"


def test_the_readme_has_the_kept_figures_and_no_others() -> None:
    text = report.README.read_text()
    figures = report.read_figures(report.DOCS)
    assert text == report.page.readme(text, figures), "run make bench BENCH=--write"
    changed = text.replace(" ms |", " s |")
    assert changed != text
    assert text == report.page.readme(changed, figures)


def test_ratios_are_taken_within_a_round() -> None:
    rates = {"kvtier": [100.0, 400.0, 300.0], _VLLM: [50.0, 400.0, 600.0]}
    series = [
        results.Series("file", "store 2 MiB", way, "throughput", "MiB/s", values)
        for way, values in rates.items()
    ]
    run = results.Result("", "2026-01-01", "abc", 1.0, _MACHINE, series, {})
    nothing = report.Figures({})
    figures = dict.fromkeys(report.SECTIONS, nothing) | {"files": report.Figures({"disk": run})}
    said = report.page.page(figures).partition("## Chunks in files")[2]
    # The rounds' ratios are 2, 1 and 0.5, with median 1. The ratio of the medians would be 0.75.
    assert "| 300 (200-350) |  | 400 |  |  | 1.00 (0.75-1.50) |" in said


def test_a_plot_is_the_same_each_time(tmp_path: Path) -> None:
    files = [tmp_path / "first.svg", tmp_path / "second.svg"]
    figures = report.read_figures(report.DOCS)["files"]
    for file in files:
        plots.draw(report.SECTIONS["files"], figures, "dark", file)
    first, second = (file.read_text() for file in files)
    assert first == second
