"""Opens pools, managers and single tiers from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering import TieringConfig
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.pool.limits import total_memory_bytes
from kvtier_sdk.registry import load_policy
from kvtier_sdk.runner import PoolMemory
from kvtier_sdk.runner.factory import make_runner, wants_process
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.services import OperatorServices
from kvtier_sdk.tiering.start_log import log_start
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener


@contextmanager
def open_pool(config: TieringConfig, *, chunk_bytes: int | None = None) -> Iterator[HostPool]:
    """Make the configured host pool, and close it at the end.

    It can be shared with other processes if a tier is to run in one.

    Args:
        config: says how big it is.
        chunk_bytes: payload of a chunk, where the engine knows it.

    Yields:
        The pool.

    Raises:
        ConfigError: the size of a chunk is missing, the engine and the configuration contradict
            each other, not one chunk fits, or the memory is not there.
    """
    size_bytes = config.chunk_bytes if chunk_bytes is None else chunk_bytes
    if size_bytes is None:
        raise ConfigError("option 'chunk_bytes' is missing; it says how big a chunk is")
    _check_chunk(config, size_bytes)
    slots = pool_slots(config, size_bytes)
    if any(map(wants_process, config.tiers)):
        pool = HostPool.create(PoolLayout(slots, size_bytes))
    else:
        pool = HostPool(slots, size_bytes)
    try:
        yield pool
    finally:
        pool.close()


def check_pool(
    config: TieringConfig, *, chunk_bytes: int, directory: str | None = None
) -> PoolLayout:
    """Check that there is room for the configured host pool, without making it.

    Args:
        config: says how big it is.
        chunk_bytes: payload of a chunk.
        directory: ``/dev/shm``, if an engine shares the pool there under a name; else ``None``.

    Returns:
        Its layout.

    Raises:
        ConfigError: not one chunk fits, or the memory is not there.
    """
    layout = PoolLayout(pool_slots(config, chunk_bytes), chunk_bytes)
    HostPool.check(layout, directory=directory)
    return layout


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
) -> Iterator[TieringManager]:
    """Make a manager, open its tiers side by side, and shut it down at the end.

    Args:
        pool: memory of the primary tier; the caller closes it afterwards.
        tiers: the configuration, of which the pool was made; or only the secondary tiers in the
            order in which they are asked, as specs or URLs, and defaults for the rest.
        namespace: of the chunks, as far as the caller knows it; facts that are configured are
            added.
        clock: time and tasks; the system's where absent.
        events: whether to collect events.
        one_copy: whether requests that want one chunk share one copy to the device.
        notify: called on a tier's thread whenever it has reported; must not block.
        engine_waits: false for an engine that serves already. Its tiers are opened in the
            background, and none of them is required.
        services: what the engine does for its operator, where it outlives the manager; the
            configuration's own where absent.

    Yields:
        The manager, ready.

    Raises:
        ConfigError: an option is wrong, or a tier cannot work with it, or the trace, the admin
            socket or the port for metrics cannot be had; nothing runs any more.
        BackendError: a store policy or the policy cannot be found or loaded.
        TierError: a tier cannot be reached.
    """
    if not isinstance(tiers, TieringConfig):
        options = {"slots": pool.slots, "chunk_bytes": pool.chunk_bytes, "tiers": list(tiers)}
        tiers = TieringConfig.from_dict(options, where="open_manager")
    config = tiers
    _check_chunk(config, pool.chunk_bytes)
    clock = clock or SystemClock()
    bound = config.bind(namespace)
    policy = load_policy(config.policy)()
    policy.open(pool.slots)
    with ExitStack() as stack:
        is_owner = services is None
        if services is None:
            services = OperatorServices(config, clock, pool.chunk_bytes)
            stack.callback(services.close)
        manager = TieringManager(
            pool,
            policy=policy,
            clock=clock,
            store_reserve=config.store_reserve,
            events=events,
            one_copy=one_copy,
            recompute_s=config.recompute_s,
            recorder=services.recorder,
        )
        runners = [
            make_runner(
                spec,
                pool,
                namespace=bound,
                clock=clock,
                notify=notify,
                verify=config.verify,
                engine_waits=engine_waits,
            )
            for spec in config.tiers
        ]
        tiers_and_runners = list(zip(config.tiers, runners, strict=True))
        log_start(pool, config.policy, tiers_and_runners, bound)
        for runner in runners:
            # Those that the manager does not get are closed too, after it.
            stack.callback(runner.close, config.shutdown_timeout_s)
        stack.callback(manager.shutdown, config.shutdown_timeout_s)
        if is_owner:
            # Before it: a manager that is closing is not asked.
            stack.callback(services.close)
        for runner in runners:
            runner.begin()
        for spec, runner in tiers_and_runners:
            manager.add_tier(spec, runner)
        size_bytes = pool.chunk_bytes
        namespaces = (spec.namespace_of(bound, size_bytes) for spec in config.tiers)
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
    shutdown_timeout_s: float = 10.0,
) -> Iterator[TierClient]:
    """Open one tier for an engine that keeps its own manager, and close it at the end.

    Args:
        tier: its specification, or its URL.
        pool: memory of the slots; the caller closes it afterwards. Make it with
            ``HostPool.create`` if the tier is to run in a process of its own.
        namespace: everything that decides whether stored bytes can be reused.
        listener: learns what becomes of the jobs.
        clock: time and tasks; the system's where absent.
        events: true to collect events.
        notify: called in a thread of the tier's whenever it has reported; must not block.
        shutdown_timeout_s: time to drain the tier, and again to close it.

    Yields:
        The client, open.

    Raises:
        ConfigError: an option is wrong, or the tier cannot work with it; nothing runs any more.
        BackendError: the backend cannot be found or loaded.
        TierError: the tier cannot be reached.
    """
    spec = TierSpec.from_url(tier) if isinstance(tier, str) else tier
    clock = clock or SystemClock()
    runner = make_runner(spec, pool, namespace=namespace, clock=clock, notify=notify, verify=True)
    log_start(pool, "the engine", [(spec, runner)], namespace)
    client = TierClient(
        spec, runner, listener, clock=clock, chunk_bytes=pool.chunk_bytes, events=events
    )
    try:
        client.open()
        yield client
    finally:
        client.close(shutdown_timeout_s)


def _check_chunk(config: TieringConfig, chunk_bytes: int) -> None:
    if config.chunk_bytes not in (None, chunk_bytes):
        raise ConfigError(
            f"option 'chunk_bytes' is {config.chunk_bytes}, but the engine's chunks have "
            f"{chunk_bytes} bytes; leave it out"
        )


def pool_slots(config: TieringConfig, chunk_bytes: int) -> int:
    """Return the number of slots of the configured host pool.

    Args:
        config: says how big it is.
        chunk_bytes: payload of a chunk.

    Raises:
        ConfigError: not one chunk fits.
    """
    if config.slots is not None:
        return config.slots
    size: int | float = config.pool_bytes or 0
    size_bytes = size if isinstance(size, int) else int(size * total_memory_bytes())
    row_bytes = PoolLayout(1, chunk_bytes).row_bytes
    slots = size_bytes // row_bytes
    if slots < 1:
        raise ConfigError(
            f"option 'pool_bytes' is {format_bytes(size_bytes)}, less than one slot of "
            f"{format_bytes(row_bytes)}; raise it to at least that"
        )
    return slots
