"""Putting a manager together from a pool, tiers and a namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtier_sdk.clock import Clock, SystemClock
from kvtier_sdk.jobs import Report
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.pool import HostPool
from kvtier_sdk.registry import load_policy
from kvtier_sdk.runner import ThreadRunner, TierLoop
from kvtier_sdk.tier_spec import TierSpec, with_unique_names
from kvtier_sdk.tiering.manager import TieringManager


@contextmanager
def open_manager(
    pool: HostPool,
    tiers: Sequence[TierSpec | str],
    namespace: Namespace,
    *,
    policy: str = "lru",
    clock: Clock | None = None,
    verify: bool = True,
    events: bool = False,
    notify: Callable[[], None] | None = None,
    shutdown_timeout_s: float = 10.0,
) -> Iterator[TieringManager]:
    """Make a manager, open its tiers, and shut it down at the end.

    Args:
        pool: memory of the primary tier; the caller closes it afterwards.
        tiers: secondary tiers in the order in which they are asked, as specs or URLs.
        namespace: of the chunks.
        policy: name of the eviction policy.
        clock: time and tasks; the system's where absent.
        verify: ``False`` switches digests off, for measurements and tests only.
        events: whether to collect events.
        notify: called on a tier's thread whenever it has reported; must not block.
        shutdown_timeout_s: for each tier, for draining and for closing.

    Yields:
        The manager, ready.

    Raises:
        ConfigError: an option is wrong, or a tier cannot work with it; nothing runs any more.
        BackendError: a backend or the policy cannot be found or loaded.
        TierError: a tier cannot be reached.
    """
    clock = clock or SystemClock()
    specs = with_unique_names(
        TierSpec.from_url(tier) if isinstance(tier, str) else tier for tier in tiers
    )
    eviction = load_policy(policy)()
    eviction.open(pool.slots)
    manager = TieringManager(pool, policy=eviction, clock=clock, events=events)
    try:
        for spec in specs:

            def make_loop(report: Callable[[Report], None], spec: TierSpec = spec) -> TierLoop:
                return TierLoop(
                    spec,
                    namespace=namespace,
                    memory=pool,
                    clock=clock,
                    report=report,
                    verify=verify,
                )

            manager.add_tier(spec, ThreadRunner(spec.name, make_loop, clock, notify))
        yield manager
    finally:
        manager.shutdown(shutdown_timeout_s)
