"""Draws a simulation's sizes, tiers, options and rates of faults, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Large enough for compressed chunks to vary in length. Some of these lengths need no padding.
CHUNK_BYTES = 576


@dataclass(frozen=True, slots=True)
class TierPlan:
    name: str
    options: dict[str, str | int | float]  # the runner's options, as in a configuration
    # Beyond this number, the tier evicts the least recently used chunk; ``None`` means no limit.
    capacity_chunks: int | None
    padded: bool  # the tier's buffers are longer than a chunk
    latency_s: float  # the longest duration of a call without a fault
    fault_rate: float  # fraction of the calls with a fault
    removals: float  # fraction of the steps in which the tier removes a chunk
    outages: float  # fraction of the steps in which an outage begins
    stalls: float  # fraction of the steps in which a stall of the tier's loop begins
    breaks_contract: bool  # one call can return a wrong number of results
    refused_openings: int  # failed attempts before the tier opens

    @property
    def longest_s(self) -> float:
        return max(float(self.options[f"{what}_deadline"]) for what in ("load", "store", "lookup"))


@dataclass(frozen=True, slots=True)
class Plan:
    slots: int
    policy: str
    store_reserve: float
    one_copy: bool
    recompute_s: float | None
    groups: int
    depth: int  # the largest number of chunks of a new conversation, per KV-cache group
    requests: int
    steps: int
    step_s: float  # the longest virtual time for which a tier runs in a step
    reset_rate: float  # fraction of the steps with a reset
    lull_rate: float  # fraction of the steps after which the engine pauses
    choosy_rate: float  # fraction of the requests that may use only some tiers
    ends: str
    tiers: tuple[TierPlan, ...]


def draw_plan(rng: random.Random, policies: Sequence[str]) -> Plan:
    slots = rng.choice([4, 6, 8, 12, 16, 20, 24, 32, 40])
    # Some seeds have no faults at all, to find breaches that would occur in everyday use.
    fault_rate = rng.choice([0.0, 0.02, 0.06, 0.2])
    tiers = rng.choices([1, 2, 3], [2, 7, 1])[0]
    return Plan(
        slots=slots,
        policy=rng.choice(list(policies)),
        store_reserve=rng.choice([0.0, 0.1, 0.3, 0.5]),
        one_copy=rng.random() < 0.3,
        recompute_s=rng.choice([None, None, 0.0005, 0.01]),
        groups=rng.choices([1, 2, 3], [3, 2, 1])[0],
        depth=rng.randint(2, 5),
        requests=rng.randint(2, 8),
        steps=rng.randint(50, 110),
        step_s=rng.choice([0.002, 0.01, 0.03]),
        reset_rate=rng.choice([0.0, 0.01, 0.04]),
        lull_rate=rng.choice([0.0, 0.01]),
        choosy_rate=rng.choice([0.0, 0.0, 0.2]),
        ends=rng.choices(["finish", "aborted", "shut down"], [3, 2, 2])[0],
        tiers=tuple(_draw_tier(rng, index, slots, fault_rate) for index in range(tiers)),
    )


def _draw_tier(rng: random.Random, index: int, slots: int, fault_rate: float) -> TierPlan:
    store_policy = rng.choices(
        ["through", "on_evict", "after_hits:1", "after_hits:2"], [4, 4, 1, 2]
    )[0]
    lookup_deadline_s = rng.uniform(0.005, 0.03)
    options: dict[str, str | int | float] = {
        "store_policy": store_policy,
        "offload_policy": "request" if rng.random() < 0.25 else "chunk",
        "lookup_deadline": lookup_deadline_s,
        "load_deadline": rng.uniform(0.02, 0.2),
        "store_deadline": rng.uniform(0.05, 0.4),
        "retries": rng.randint(0, 2),
        "retry_delay": rng.uniform(0.001, 0.01),
        "concurrency": rng.choice([1, 2, 8]),
        "max_batch": CHUNK_BYTES * rng.choice([1, 2, 1000]),
        "max_queue": CHUNK_BYTES * rng.choice([2, 4, 1000]),
        "breaker_failures": rng.randint(2, 5),
        "breaker_window": rng.choice([6, 20]),
        "probe_interval": rng.uniform(0.02, 0.2),
        "max_probe_interval": 0.5,
    }
    return TierPlan(
        name=f"tier{index}",
        options=options,
        capacity_chunks=rng.choice([None, slots, 2 * slots]),
        padded=rng.random() < 0.2,
        # The highest latency makes some lookups late even without a fault.
        latency_s=lookup_deadline_s * rng.choice([0.0, 0.1, 0.3, 0.6, 1.1]),
        fault_rate=fault_rate,
        removals=rng.choice([0.0, 0.1]),
        stalls=rng.choice([0.0, 0.05]),
        outages=rng.choice([0.0, 0.01]) if fault_rate else 0.0,
        breaks_contract=fault_rate > 0 and rng.random() < 0.05,
        refused_openings=rng.choice([0, 0, 0, 0, 1, 3]) if fault_rate else 0,
    )
