from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from kvtier_sdk import TierSpec
from support.chaos.play import CHUNK_BYTES, LOOKUP_DEADLINE_S, PER_SECOND, SLOTS, Pace
from support.chaos.scenarios import FAULTS, Fault, Outcome, Scenario

#: The text below this line is written by hand. :func:`write_page` keeps it.
MARKER = "<!-- written by hand from here on -->\n"

_TEMPLATE = Path(__file__).with_name("reliability.md.in")


def write_page(path: Path, outcomes: Sequence[Outcome], pace: Pace) -> None:
    by_hand = ""
    if path.exists() and MARKER in (before := path.read_text()):
        by_hand = "\n" + MARKER + before.partition(MARKER)[2]
    by_scenario: dict[Scenario, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_scenario[outcome.scenario].append(outcome)
    defaults = TierSpec.from_url("memory:").runner
    page = _TEMPLATE.read_text().format(
        tries=max(map(len, by_scenario.values())),
        per_second=PER_SECOND,
        chunk_kib=CHUNK_BYTES // 1024,
        slots=SLOTS,
        before_s=pace.before_s,
        fault_s=pace.fault_s,
        lookup_ms=LOOKUP_DEADLINE_S * 1e3,
        load_s=defaults.load_deadline_s,
        store_s=defaults.store_deadline_s,
        probe_s=pace.probe_interval_s,
        tried=len(outcomes),
        machine=_machine(),
        wrong=sum(outcome.wrong_bytes for outcome in outcomes),
        compared=sum(outcome.compared_bytes for outcome in outcomes) / 1e9,
        lost=sum(outcome.lost for outcome in outcomes),
        stored=sum(outcome.stored for outcome in outcomes),
        late=sum(outcome.late_retries for outcome in outcomes),
        failed=_failures(outcomes),
        quick=_quick(outcomes, pace),
        rows=_table(_row(scenario, tries) for scenario, tries in by_scenario.items()),
        faults="\n".join(map(_described, FAULTS)),
    )
    path.write_text(page + by_hand)


def _row(scenario: Scenario, tries: Sequence[Outcome]) -> list[object]:
    longest = max(tries, key=lambda outcome: outcome.stall_us)
    return [
        scenario.fault.title,
        f"{scenario.backend}, {scenario.runner}",
        _shown(tries),
        _spread(outcome.closed_s for outcome in tries),
        _spread(outcome.loaded_s for outcome in tries),
        f"{longest.stall_us / 1e3:.1f} (`{longest.stall_in}`)",
        f"{max(outcome.stall_cpu_us for outcome in tries) / 1e3:.2f}",
    ]


def _described(fault: Fault) -> str:
    destroys = " (destroys the medium)" if fault.destroys else ""
    return f"- **{fault.title}**{destroys}: {fault.made_by}."


def _shown(tries: Sequence[Outcome]) -> str:
    latest: dict[str, float] = {}
    for outcome in tries:
        for state, after_s in outcome.shown.items():
            latest[state] = max(after_s, latest.get(state, 0.0))
    in_order = sorted(latest.items(), key=itemgetter(1))
    return ", ".join(f"{state} {after_s:.1f}" for state, after_s in in_order) or "ok"


def _spread(values: Iterable[float | None]) -> str:
    known = [float("inf") if value is None else value for value in values]
    shown = [f"{statistics.median(known):.2f}", f"{max(known):.2f}"]
    return ", ".join(dict.fromkeys(shown))


def _table(rows: Iterable[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _quick(outcomes: Sequence[Outcome], pace: Pace) -> str:
    shown = [outcome.closed_s for outcome in outcomes if outcome.shown]
    quick = [s for s in shown if s is not None and s <= pace.probe_interval_s]
    return f"{len(quick)} of the {len(shown)} tries in which it was not"


def _failures(outcomes: Sequence[Outcome]) -> str:
    failed = [f"{o.scenario}: {', '.join(o.breaches())}" for o in outcomes if o.breaches()]
    if not failed:
        return "Every try kept every rule."
    return "Tries that did not keep every rule: " + "; ".join(failed) + "."


def _machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"a machine with {os.cpu_count()} cores ({platform.machine()}), {memory_gib:.0f} GiB and "
        f"Linux {platform.release().partition('-')[0]}"
    )
