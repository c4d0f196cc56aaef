from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.simulation.breach import Breach
from support.simulation.report import SimulationReport
from support.simulation.world import simulate


def soak(
    first_seed: int,
    seeds: int,
    *,
    processes: int | None = None,
    on_progress: Callable[[SimulationReport], None] | None = None,
) -> SimulationReport:
    total = SimulationReport()
    with _outcomes(range(first_seed, first_seed + seeds), processes) as outcomes:
        for outcome in outcomes:
            if isinstance(outcome, Breach):
                raise outcome
            total.add(outcome)
            if on_progress is not None:
                on_progress(total)
    return total


@contextmanager
def _outcomes(seeds: range, processes: int | None) -> Iterator[Iterator[SimulationReport | Breach]]:
    count = min(len(seeds), processes or os.cpu_count() or 1)
    if count <= 1:
        yield map(_outcome, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        yield pool.imap_unordered(_outcome, seeds, chunksize=4)


def _outcome(seed: int) -> SimulationReport | Breach:
    try:
        return simulate(seed)
    except Breach as breach:
        return breach
