"""Reports on counters and gauges of the tier's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.scripted_loop import LOOKUP, Rig, ScriptedTier

from kvtier_sdk import OffloadKey, RequestContext

Make = Callable[..., Rig]


async def open_with_metrics(tier: ScriptedTier) -> None:
    await ScriptedTier.open(tier)
    tier.context.counter("lookups")
    tier.context.gauge("open").set(1)


async def count(
    tier: ScriptedTier, keys: Sequence[OffloadKey], request: RequestContext
) -> Sequence[bool]:
    tier.context.counter("lookups").add()
    return await ScriptedTier.lookup(tier, keys, request)


async def close(tier: ScriptedTier) -> None:
    tier.context.gauge("open").set(0)
    await ScriptedTier.close(tier)


DECLARES = {"open": open_with_metrics, "lookup": count, "close": close}


def told(rig: Rig) -> list[tuple[dict[str, float], dict[str, float]]]:
    return [(dict(report.counters), dict(report.gauges)) for report in rig.account.metrics]


def test_changes_are_reported_once_a_second_and_at_the_end(make: Make) -> None:
    rig = make(declares=DECLARES)
    assert told(rig) == [({"lookups": 0.0}, {"open": 1.0})]
    for _ in range(3):
        rig.ask(LOOKUP, run_s=0.2)
    assert len(told(rig)) == 1
    rig.run_for(10.0)
    assert told(rig)[1:] == [({"lookups": 3.0}, {})]
    rig.ask(LOOKUP, run_s=0.01)
    rig.run(rig.loop.close())
    assert told(rig)[2:] == [({"lookups": 1.0}, {"open": 0.0})]
