"""Runs all benchmarks and writes the page with their figures, docs/performance.md.

Usage: python benchmarks/report.py [--only SECTION ...] [--quick] [--rounds N] [--trace FILE]

Each section runs its benchmarks, stores their figures in docs/performance/SECTION.json and draws
plots. Then the page and the README's table are written from the figures of all sections, including
sections measured earlier. If a run fails, its earlier figures stay.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import results
from performance import figures as store
from performance import page
from performance.figures import Figures
from performance.sections import SECTIONS, Run, Section
from results import ROOT, Result
from runner import positive

DOCS = ROOT / "docs"
_QUICK_DOCS = ROOT / "build" / "docs"
README = ROOT / "README.md"
_QUICK_ROUNDS = 2
_MISSING = "{}'s environment is missing; 'make bench-peers' makes it"


class CannotRunError(Exception):
    """Raised if a benchmark cannot run; the message gives the reason."""


def main() -> int:
    arguments = _arguments()
    chosen = [SECTIONS[name] for name in arguments.only or SECTIONS] if not arguments.write else []
    failed = [reason for section in chosen for reason in _measure(section, arguments)]
    write_pages(arguments.into)
    for reason in failed:
        print(f"not measured: {reason}", file=sys.stderr)
    return 1 if failed else 0


def write_pages(docs: Path) -> None:
    from performance.plots import draw

    measured = read_figures(docs)
    for name, figures in measured.items():
        for scheme in ("light", "dark") if SECTIONS[name].is_drawn(figures) else ():
            draw(SECTIONS[name], figures, scheme, docs / "performance" / f"{name}-{scheme}.svg")
    written = {docs / "performance.md": page.page(measured)}
    if docs == DOCS:
        written[README] = page.readme(README.read_text(), measured)
    for file, text in written.items():
        file.write_text(text)
        print(f"written: {file}", file=sys.stderr)


def read_figures(docs: Path) -> dict[str, Figures]:
    return {name: store.read(docs / "performance" / f"{name}.json") for name in SECTIONS}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--only", nargs="+", choices=SECTIONS, help="measure these sections")
    option("--quick", action="store_true", help="little work and two rounds, to try the report")
    option("--rounds", type=positive, help="of every benchmark; each has its own default")
    option("--trace", type=Path, help="block-hash trace, for what takes one")
    vllm = ROOT / ".venv-vllm/bin/python"
    option("--vllm", type=Path, default=vllm, help="interpreter of vLLM's environment")
    into = "directory to write into (docs/, and the README; build/docs/ with --quick)"
    option("--into", type=Path, help=into)
    option("--write", action="store_true", help="measure nothing: write plots and pages again")
    arguments = parser.parse_args()
    into = arguments.into or (_QUICK_DOCS if arguments.quick else DOCS)
    arguments.into = into.resolve()
    return arguments


# --- running ----------------------------------------------------------------------------------


def _measure(section: Section, arguments: argparse.Namespace) -> list[str]:
    """Measure a section, and return the reason for each failed run."""
    file = arguments.into / "performance" / f"{section.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    before = store.read(file).runs
    now: dict[str, Result] = {}
    failures = []
    for run in section.runs:
        print(f"measuring {section.name}: {run.name}", file=sys.stderr, flush=True)
        try:
            now[run.name] = _run(run, arguments)
        except CannotRunError as error:
            failures.append(f"{section.name}: {run.name}: {error}")
            nothing = Result("", "", "", 0.0, {}, absent={"all": str(error)})
            now[run.name] = before.get(run.name) or nothing
    store.write(file, Figures(now, arguments.quick))
    return failures


def _run(run: Run, arguments: argparse.Namespace) -> Result:
    python, absent = _interpreter(run, arguments.vllm)
    rounds = arguments.rounds or (_QUICK_ROUNDS if arguments.quick else run.rounds)
    if run.needs_trace and not arguments.trace:
        raise CannotRunError("it needs a trace: make bench TRACE=FILE")
    trace = shlex.quote(str(arguments.trace)) if arguments.trace else ""
    program, *options = shlex.split(
        (run.quick if arguments.quick else run.command).format(trace=trace)
    )
    if run.rounds:
        options += ["--rounds", str(rounds)]
    with tempfile.TemporaryDirectory(prefix="kvtier-report-") as folder:
        file = Path(folder) / "figures.json"
        command = [str(python), str(ROOT / "benchmarks" / program), *options]
        ran = subprocess.run(
            [*command, "--json", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ran.returncode or not file.exists():
            said = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
            reason = re.sub(r"^[\w.]+(Error|Exception): ", "", said[-1]) if said else ""
            raise CannotRunError(reason or f"exit status {ran.returncode}")
        result = results.read(file)
    return replace(result, absent={**result.absent, **absent})


def _interpreter(run: Run, vllm: Path) -> tuple[Path, Mapping[str, str]]:
    """Return a run's interpreter, and a reason for each way that it cannot measure."""
    if run.engine:
        python = vllm if run.engine == "vLLM" else ROOT / f".venv-{run.engine.lower()}/bin/python"
        if not python.exists():
            raise CannotRunError(_MISSING.format(run.engine))
        return python, {}
    if vllm.exists() and run.vllm:
        return vllm, {}
    return Path(sys.executable), dict.fromkeys(run.vllm, _MISSING.format("vLLM"))


if __name__ == "__main__":
    sys.exit(main())
