"""The command ``python -m support.simulation``, which plays one seed or many."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from support.simulation.breach import Breach
from support.simulation.report import SimulationReport
from support.simulation.soak import soak
from support.simulation.world import simulate

_EVERY_SEEDS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.seed is not None:
            report = simulate(options.seed, echo=print if options.trace else None)
        else:
            report = soak(
                options.first, options.seeds, processes=options.processes, on_progress=_progress
            )
    except Breach as breach:
        print(f"\n{breach.story()}", file=sys.stderr)
        return 1
    print(report.table())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m support.simulation",
        description="Play random requests and troubles against the tiering manager, on virtual "
        "time, and check its rules after every step. Exit status 1: a rule was broken.",
    )
    parser.add_argument("--seed", type=int, help="play this seed alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: show each action")
    parser.add_argument("--seeds", type=_positive, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument(
        "--processes", type=_positive, help="how many at once (default: one a core)"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _progress(total: SimulationReport) -> None:
    if total.seeds % _EVERY_SEEDS == 0:
        print(f"{total.seeds:,} seeds, {total.steps:,} steps", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
