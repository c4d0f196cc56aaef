from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulationReport:
    seeds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    digest: int = 0

    def add(self, other: SimulationReport) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.virtual_s += other.virtual_s
        self.counts.update(other.counts)
        self.digest ^= other.digest

    def table(self) -> str:
        width = max(map(len, self.counts), default=0)
        lines = [f"  {what:{width}}  {count:>12,}" for what, count in sorted(self.counts.items())]
        head = (
            f"{self.seeds:,} seeds, {self.steps:,} steps, {self.virtual_s:,.0f} s of virtual time"
        )
        return "\n".join([head, *lines])
