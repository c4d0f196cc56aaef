"""``python -m support.chaos docs/reliability.md``: play every scenario, and write the page."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from support.chaos.page import write_page
from support.chaos.places import CannotHappenError
from support.chaos.play import Pace, play
from support.chaos.scenarios import Outcome, Scenario, scenarios


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.chaos", description=__doc__)
    parser.add_argument("page", type=Path, help="is written, but for what stands below its marker")
    parser.add_argument("--tries", type=int, default=3, help="of each scenario; default: 3")
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for number in range(options.tries):
        for scenario in scenarios():
            if options.only in str(scenario):
                outcomes += _try(scenario, number)
    write_page(options.page, outcomes, Pace())
    return 1 if any(outcome.breaches() for outcome in outcomes) else 0


def _try(scenario: Scenario, number: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="kvtier-chaos-", ignore_cleanup_errors=True) as made:
        try:
            outcome = play(scenario, Path(made), Pace(), seed=number)
        except CannotHappenError as error:
            print(f"{scenario}: {error}", file=sys.stderr)
            return []
    said = "; ".join(outcome.breaches()) or "all rules hold"
    print(f"try {number + 1}, {scenario}: {said}; {outcome.grown}", flush=True)
    return [outcome]


if __name__ == "__main__":
    sys.exit(main())
