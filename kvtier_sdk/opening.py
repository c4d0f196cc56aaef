"""Opens host pools, managers and single tiers, for engines and for blocking tools."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.errors import ConfigError, TierUnavailableError
from kvtier_sdk.events import Announce
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.operator.services import OperatorServices
from kvtier_sdk.operator.start_log import log_start
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import HostPool, PoolLayout, PoolMemory
from kvtier_sdk.pool.limits import total_memory_bytes
from kvtier_sdk.registry import load_policy
from kvtier_sdk.runner.factory import make_runner, wants_process
from kvtier_sdk.runner.jobs import Job, JobResult
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener

#: A tool polls at least this often, because only a poll can end an overdue job.
_LOOK_S = 1.0


@contextmanager
def open_pool(config: TieringConfig, *, chunk_bytes: int | None = None) -> Iterator[HostPool]:
    """Create the configured host pool, and close it at the end.

    The pool is in shared memory if a tier runs in a separate process. ``config`` determines the
    pool's size, and the length of a chunk if ``chunk_bytes`` is ``None``.

    Raises:
        ConfigError: the configured chunk length is missing or contradicts the engine's, no chunk
            fits, or there is not enough memory.
    """
    size_bytes = config.chunk_bytes if chunk_bytes is None else chunk_bytes
    if size_bytes is None:
        raise ConfigError("option 'chunk_bytes' is missing; it says how big a chunk is")
    check_chunk(config, size_bytes)
    slots = pool_slots(config, size_bytes)
    if any(map(wants_process, config.tiers)):
        pool = HostPool.create(PoolLayout(slots, size_bytes))
    else:
        pool = HostPool(slots, size_bytes)
    with closing(pool):
        yield pool


def check_chunk(config: TieringConfig, chunk_bytes: int) -> None:
    """Raise a :class:`ConfigError` if a chunk length other than ``chunk_bytes`` is configured."""
    if config.chunk_bytes not in (None, chunk_bytes):
        raise ConfigError(
            f"option 'chunk_bytes' is {config.chunk_bytes}, but the engine's chunks have "
            f"{chunk_bytes} bytes; leave it out"
        )


def pool_size_bytes(config: TieringConfig) -> int:
    """Return the host pool's size in bytes, or 0 if ``config`` has a number of slots."""
    size: int | float = config.pool_bytes or 0
    return size if isinstance(size, int) else int(size * total_memory_bytes())


def pool_slots(config: TieringConfig, chunk_bytes: int) -> int:
    """Return the number of slots; raise a :class:`ConfigError` if no chunk fits."""
    if config.slots is not None:
        return config.slots
    size_bytes = pool_size_bytes(config)
    row_bytes = PoolLayout(1, chunk_bytes).row_bytes
    slots = size_bytes // row_bytes
    if slots < 1:
        raise ConfigError(
            f"option 'pool_bytes' is {format_bytes(size_bytes)}, less than one slot of "
            f"{format_bytes(row_bytes)}; raise it to at least that"
        )
    return slots


@contextmanager
def open_manager(
    pool: PoolMemory,
    tiers: TieringConfig | Sequence[TierSpec | str],
    namespace: Namespace,
    *,
    clock: Clock | None = None,
    events: bool = False,
    one_copy: bool = False,
    notify: Callable[[], None] | None = None,
    engine_waits: bool = True,
    services: OperatorServices | None = None,
    policy_now_s: Callable[[], float] | None = None,
) -> Iterator[TieringManager]:
    """Create a manager, open its tiers in parallel, and shut the manager down at the end.

    Args:
        pool: the primary tier's memory, which the caller closes afterwards.
        tiers: the configuration from which the pool was made, or only the secondary tiers (specs
            or URLs). If several tiers have a chunk, the manager loads it from the first of them.
        namespace: the engine's facts, to which the configured facts are added.
        clock: the source of time and tasks; the system's by default.
        events: true to collect events.
        one_copy: true if requests that want the same chunk share one copy to the device.
        notify: called on a tier's thread when the tier has new reports; it must not block.
        engine_waits: false for an engine that is already serving requests. Its tiers are opened in
            the background, and the engine runs without tiers that do not open.
        services: the engine's services for its operator, if they outlive the manager. By default,
            the configuration determines the services, which are closed with the manager.
        policy_now_s: returns the time for the eviction policy; by default the clock's time.

    Raises:
        ConfigError: an option is wrong, or a service cannot be opened.
        BackendError: a backend or a policy cannot be found or loaded.
        TierError: a tier cannot be reached. After any error, everything is closed.
    """
    if not isinstance(tiers, TieringConfig):
        options = {"slots": pool.slots, "chunk_bytes": pool.chunk_bytes, "tiers": list(tiers)}
        tiers = TieringConfig.from_dict(options, where="open_manager")
    config = tiers
    check_chunk(config, pool.chunk_bytes)
    clock = clock or SystemClock()
    bound = config.bind(namespace)
    policy = load_policy(config.policy)()
    policy.open(pool.slots)
    with ExitStack() as stack:
        is_owner = services is None
        if services is None:
            services = OperatorServices(config, clock, pool.chunk_bytes)
            stack.callback(services.close)
        announce = None if services.publisher is None else services.publisher.source()
        manager = TieringManager(
            pool,
            policy=policy,
            clock=clock,
            store_reserve=config.store_reserve,
            events=events,
            one_copy=one_copy,
            recompute_s=config.recompute_s,
            namespace=bound,
            recorder=services.recorder,
            hint_share=config.hint_share(pool.slots * pool.chunk_bytes),
            hint_duration_s=config.hint_duration_s,
            policy_now_s=policy_now_s,
            announce=announce,
        )
        told = "tokens" if config.events_tokens else "hashes"
        facts: Any = {"verify": config.verify, "inventory": told if announce else "off"}
        hears: Any = {"notify": notify, "announce": announce}
        specs = [
            replace(spec if engine_waits else spec.in_background(), **facts)
            for spec in config.tiers
        ]
        runners = [make_runner(spec, pool, namespace=bound, clock=clock, **hears) for spec in specs]
        tiers_and_runners = list(zip(specs, runners, strict=True))
        log_start(pool, config.policy, tiers_and_runners, bound)
        for runner in runners:
            # The manager closes only the runners given to ``add_tier``, so close each runner here.
            stack.callback(runner.close, config.shutdown_timeout_s)
        stack.callback(manager.shutdown, config.shutdown_timeout_s)
        if is_owner:
            # Close the services before the manager, because they call the manager.
            stack.callback(services.close)
        for runner in runners:
            runner.begin()
        for spec, runner in tiers_and_runners:
            manager.add_tier(spec, runner)
        namespaces = (spec.namespace_of(bound, pool.chunk_bytes) for spec in config.tiers)
        services.attend(manager, {one.fingerprint for one in namespaces})
        yield manager


@contextmanager
def open_tier(
    tier: TierSpec | str,
    pool: PoolMemory,
    namespace: Namespace,
    listener: TierListener,
    *,
    clock: Clock | None = None,
    events: bool = False,
    notify: Callable[[], None] | None = None,
    announce: Announce | None = None,
    shutdown_timeout_s: float = 10.0,
    engine: str = "the engine",
) -> Iterator[TierClient]:
    """Open one tier for an engine that keeps its own manager, and close it at the end.

    Args:
        tier: the tier's URL or specification. For an engine that is already serving requests, pass
            the result of :meth:`TierSpec.in_background`.
        pool: the slots' memory, which the caller closes afterwards. A tier in a separate process
            needs memory from ``HostPool.create``.
        namespace: the facts that decide whether stored bytes can be reused.
        listener: the receiver of each job's outcome.
        clock: see :func:`open_manager`, which also describes ``events`` and ``notify``.
        announce: called in any thread when this or another process adds or removes chunks in the
            tier's store; it must not block. The first event has no keys, and withdraws all chunks.
        shutdown_timeout_s: seconds allowed for draining the tier, and again for closing it.
        engine: the engine's name, for the log.

    Raises:
        ConfigError: an option is wrong, or unsuitable for the tier.
        BackendError: the backend cannot be found or loaded.
        TierError: the tier cannot be reached. After any error, everything is closed.
    """
    spec = TierSpec.from_url(tier) if isinstance(tier, str) else tier
    if spec.is_rounded and "compress" not in namespace.facts:
        raise ConfigError(
            f"tier {spec.name!r}: the engine would store chunks that 'compress=fp8' has rounded in "
            "its other tiers too; set the fact compress to 'fp8' in option 'namespace' of all of "
            "them, or choose kvtier's own manager"
        )
    spec = replace(spec, inventory="off" if announce is None else "hashes")
    clock = clock or SystemClock()
    hears: Any = {"notify": notify, "announce": announce}
    runner = make_runner(spec, pool, namespace=namespace, clock=clock, **hears)
    log_start(pool, engine, [(spec, runner)], namespace)
    size_bytes = pool.chunk_bytes
    client = TierClient(spec, runner, listener, clock=clock, chunk_bytes=size_bytes, events=events)
    try:
        client.open()
        yield client
    finally:
        client.close(shutdown_timeout_s)


@dataclass(eq=False)
class BlockingTier:
    """A tier for a caller that waits for each job."""

    client: TierClient
    _reported: threading.Event
    _clock: Clock

    @classmethod
    def make(
        cls, spec: TierSpec, pool: PoolMemory, namespace: Namespace, *, clock: Clock
    ) -> BlockingTier:
        """Create a tier without opening its client."""
        reported = threading.Event()
        runner = make_runner(spec, pool, namespace=namespace, clock=clock, notify=reported.set)
        size_bytes = pool.chunk_bytes
        client = TierClient(spec, runner, TierListener(), clock=clock, chunk_bytes=size_bytes)
        return cls(client, reported, clock)

    def result_of(self, job: Job | None) -> JobResult:
        """Return a job's result. Wait for it at most until shortly after the job's deadline."""
        # The queue was empty, so ``None`` means a refusal, usually by an open breaker.
        if job is None:
            raise TierUnavailableError(f"{self.client.spec.name}: its breaker is open")
        self.client.flush()
        self.wait(lambda: job.result is not None)
        return cast(JobResult, job.result)

    def wait(self, is_over: Callable[[], bool], within_s: float = math.inf) -> None:
        end_s = self._clock.now_s() + within_s
        self.client.poll()
        while not is_over() and (left_s := end_s - self._clock.now_s()) > 0:
            self._reported.wait(min(left_s, _LOOK_S))
            # Clear the event first, because a report during the poll must end the next wait.
            self._reported.clear()
            self.client.poll()
