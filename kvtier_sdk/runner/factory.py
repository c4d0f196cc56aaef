"""Chooses a tier's runner, a thread or a separate process, and creates the runner."""

from __future__ import annotations

from typing import Any

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.runner import ProcessRunner, ThreadRunner
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.process.bootstrap import fault_of
from kvtier_sdk.types import Locality, Medium

_NOT_SHARED = (
    "the host pool is of one process: make it with open_pool, HostPool.create or HostPool.join"
)


def wants_process(spec: TierSpec) -> bool:
    """Return true if the tier of ``spec`` needs a separate process, or runs better in one."""
    option = spec.runner.runner
    tier_class = spec.tier_class
    if tier_class.needs_process:
        return True
    # In a thread, a tier that does I/O would compete with the engine for the interpreter lock.
    outside = tier_class.medium is not Medium.CPU or tier_class.locality is Locality.REMOTE
    return option == "process" or (option == "auto" and outside)


def make_runner(
    spec: TierSpec, pool: PoolMemory, *, clock: Clock, **others: Any
) -> ThreadRunner | ProcessRunner:
    """Create the runner; raise ConfigError if a separate process is required but impossible."""
    runner: type[ThreadRunner | ProcessRunner] = ThreadRunner
    if wants_process(spec):
        fault = fault_of(spec) if pool.is_shared else _NOT_SHARED
        if fault is None:
            runner = ProcessRunner
        elif spec.tier_class.needs_process:
            raise ConfigError(
                f"tier {spec.name!r}: backend {spec.backend!r} has to run in a process of its own, "
                f"but {fault}"
            )
        else:
            fault = f"{fault}, or use runner 'thread'"
            if spec.runner.runner == "process":
                raise ConfigError(f"tier {spec.name!r}: option 'runner' is 'process', but {fault}")
            TierLog(spec.name, clock).warning(
                "runs in a thread, which may slow the engine down: %s", fault
            )
    return runner(spec, pool=pool, clock=clock, **others)
