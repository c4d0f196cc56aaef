"""Writes the performance page and the README's table from the figures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from results import Series, figure, gain

from performance.figures import Figures, median
from performance.sections import SECTIONS, Section, Way, label

_BEGIN, _END = "<!-- written by make bench -->", "<!-- end of what make bench writes -->"
_INTRODUCTION = """# Performance

What does kvtier gain, beside vLLM's own tiers, the usual clients and the most that the machine can
do? Each figure is a median over rounds, in which all sides take turns. kvtier's figures and the
ratios have quartiles in brackets. A ratio (columns "beside ...") is taken within each round; above
1 it is better for kvtier. Bars show medians, and the lines on them quartiles.

`make bench` measures it all and writes this page. [Benchmarks](benchmarks.md) says how the figures
are made, and where the time goes.
"""
_QUICK = "**These figures are of a quick run, which shows only that the report works.**"


def page(figures: Mapping[str, Figures]) -> str:
    parts = [_INTRODUCTION, *([_QUICK + "\n"] if _is_quick(figures) else [])]
    if rows := list(_glance(figures, "")):
        parts.append("## At a glance\n\n" + _glance_table(rows) + "\n")
    parts += [_section(section, figures[section.name]) for section in SECTIONS.values()]
    parts.append(_machines(figures))
    return "\n".join(parts)


def readme(text: str, figures: Mapping[str, Figures]) -> str:
    table = _glance_table(list(_glance(figures, "docs/performance.md")))
    quick = " A quick run." if _is_quick(figures) else ""
    caption = (
        f"Medians, from {_machine_words(figures)}.{quick} `make bench` measures yours; "
        "see [Performance](docs/performance.md)."
    )
    block = f"{_BEGIN}\n{table}\n\n{caption}\n{_END}"
    return re.sub(f"{_BEGIN}.*?{_END}", lambda _: block, text, flags=re.DOTALL)


# --- at a glance ------------------------------------------------------------------------------


def _glance(figures: Mapping[str, Figures], page: str) -> Iterator[list[str]]:
    """Yield a row for each subject: a peer's figure, kvtier's figure and their ratio."""

    def link(section: str, subject: str) -> str:
        return f"[{subject}]({page}#{_anchor(SECTIONS[section].title)})"

    def row(subject: str, beside: str, own: Series | None, peer: Series | None) -> list[list[str]]:
        if own is None or peer is None:
            return []
        return [[subject, f"{beside}: {median(peer)}", median(own) or "", gain(own, peer) or ""]]

    panel, of_token = SECTIONS["first-token"].panels[0], figures["first-token"]
    cases = ("from files", "computed")
    own, computed = (panel.find(of_token, case, panel.ways[0].name) for case in cases)
    subject = "first token of a prompt of 2,048 tokens, all of it in files"
    yield from row(link("first-token", subject), "computed", own, computed)
    for name, section in SECTIONS.items():
        for panel in section.panels:
            peers = [way for role in ("client", "vllm") for way in panel.ways if way.role == role]
            for case, subject in panel.glance.items():
                ways = (panel.ways[0], peers[-1])
                found = (panel.find(figures[name], case, way.name) for way in ways)
                yield from row(link(name, subject), peers[-1].shown, *found)
    panel = SECTIONS["first-token"].panels[0]
    ways = (panel.ways[-1].name, panel.ways[0].name)
    of = (panel.run, panel.group, "damaged files")
    answers = [figures["first-token"].find(*of, way, "same answer") for way in ways]
    said = {1.0: "found, computed again: the same answer", 0.0: "**used: another answer**"}
    if all(answers):
        subject = link("first-token", "one byte of each stored chunk flips")
        yield [subject, *(said[one.median] for one in answers if one), ""]


def _glance_table(rows: Sequence[Sequence[str]]) -> str:
    return _table([["", "peer", "kvtier", "ratio"], ["---"] * 4, *rows]).replace("|  |", "| |", 1)


# --- sections ---------------------------------------------------------------------------------


def _section(section: Section, figures: Figures) -> str:
    command = f'`make bench BENCH="--only {section.name}"`'
    head = f"## {section.title}\n\n"
    if not any(run.series for run in figures.runs.values()):
        reasons = sorted(
            {reason for run in figures.runs.values() for reason in run.absent.values()}
        )
        why = f": {'; '.join(reasons)}" if reasons else ""
        return f"{head}{section.question}\n\nNot measured yet{why}. Run {command}.\n"
    plot = (
        f'<picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="performance/{section.name}-dark.svg">'
        f'<img alt="{section.title}: the table below as a plot" '
        f'src="performance/{section.name}-light.svg"></picture>'
    )
    rounds = max(len(each.values) for run in figures.runs.values() for each in run.series)
    notes = (
        f"{command} · {rounds} round{'s' * (rounds > 1)} · "
        f"[all figures of all rounds](performance/{section.name}.json)"
    )
    shown = [plot, *_tables(section, figures)] if section.panels else []
    parts = [section.said(figures), section.question, *shown]
    parts += [*_absences(section, figures), notes]
    return head + "\n\n".join(filter(None, parts)) + "\n"


def _tables(section: Section, figures: Figures) -> Iterator[str]:
    """Yield one table for each group of adjacent panels with the same columns."""
    for (axis, ways, better), panels in itertools.groupby(
        section.panels,
        lambda panel: (panel.axis, tuple(panel.ways), panel.better),
    ):
        peers = compared(ways)
        heads = [f"{axis}, {better} is better"]
        heads += [way.shown for way in ways] + [f"beside {way.shown}" for way in peers]
        lines = [heads, ["---"] * len(heads)]
        for panel in panels:
            for case in panel.cases or figures.cases(panel.run, panel.group, panel.quantity):
                series = {way: panel.find(figures, case, way.name) for way in ways}
                if any(series.values()):
                    own = series[ways[0]]
                    cells = [figure(one.median) if one else "" for one in series.values()]
                    if own:
                        cells[0] = own.spread
                    ratios = [gain(own, series[way]) or "" for way in peers]
                    lines.append(
                        [", ".join(filter(None, (panel.title, label(case)))), *cells, *ratios]
                    )
        if len(lines) > 2:
            yield _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def compared(ways: Sequence[Way]) -> list[Way]:
    """Return the ways to compare with: the limits, and vLLM or, without vLLM, the clients."""
    peer = "vllm" if any(way.role == "vllm" for way in ways) else "client"
    return [way for way in ways if way.role in (peer, "limit")]


def _absences(section: Section, figures: Figures) -> Iterator[str]:
    """For each run or way without figures, yield a sentence with the reason."""
    said = set()
    for name in (run.name for run in section.runs):
        run = figures.runs.get(name)
        if run is None or not run.series:
            reason = "; ".join(run.absent.values()) if run else "not run yet"
            said.add(f"Not measured, {name}: {reason}.")
    for panel in section.panels:
        run = figures.runs.get(panel.run)
        for way in panel.ways if run and run.series else ():
            if not any(
                (each.group, each.quantity, each.way) == (panel.group, panel.quantity, way.name)
                for each in run.series
            ):
                reason = run.absent.get(way.name, "the benchmark left it out")
                said.add(f"Not measured, {way.shown}: {reason}.")
    yield from sorted(said)


# --- machine ----------------------------------------------------------------------------------


def _machines(figures: Mapping[str, Figures]) -> str:
    runs = {
        f"{name}: {run_name}": run
        for name, of in figures.items()
        for run_name, run in of.runs.items()
        if run.series
    }
    lines = [["run", "day", "commit", "duration", "disk", "CPU used by others"], ["---"] * 6]
    for name, run in runs.items():
        measured = [name, run.date, run.commit, f"{run.seconds:,.0f} s"]
        others = re.sub(r"used (\S+) of the CPU after it", r"\1", run.machine["other programs"])
        lines.append([*measured, run.machine["disk"], others])
    facts = {"Machine": ("CPU", "memory", "kernel"), "Software": ("software",)}
    said = []
    for title, keys in facts.items():
        by_fact: dict[str, list[str]] = {}
        for name, run in runs.items():
            by_fact.setdefault(", ".join(run.machine[key] for key in keys), []).append(name)
        for fact, names in by_fact.items():
            where = "" if len(by_fact) == 1 else f" ({', '.join(names)})"
            said.append(f"- {title}: {fact}{where}")
    return "## Runs and machine\n\n" + "\n".join(said) + "\n\n" + _table(lines) + "\n"


def _machine_words(figures: Mapping[str, Figures]) -> str:
    machines = {
        f"{run.machine['CPU']}, without a GPU"
        for of in figures.values()
        for run in of.runs.values()
        if run.series
    }
    return " and ".join(sorted(machines)) or "no machine yet"


def _is_quick(figures: Mapping[str, Figures]) -> bool:
    return any(of.quick for of in figures.values())


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
