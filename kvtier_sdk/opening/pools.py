"""Computes the size of a configured host pool, checks it, and opens the pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.pool.limits import total_memory_bytes
from kvtier_sdk.runner.factory import wants_process


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
    try:
        yield pool
    finally:
        pool.close()


def check_chunk(config: TieringConfig, chunk_bytes: int) -> None:
    """Raise a :class:`ConfigError` if the configuration has another chunk length."""
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
