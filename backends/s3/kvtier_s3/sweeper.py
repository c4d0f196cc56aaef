"""Enforces ``capacity`` and ``max_age``: at intervals, one process deletes the oldest chunks."""

from __future__ import annotations

import asyncio
import heapq
import uuid
from collections.abc import Iterable
from contextlib import suppress

from kvtier_s3.bucket import Bucket, StoredObject
from kvtier_s3.config import S3TierConfig
from kvtier_s3.objects import Objects
from kvtier_sdk import ObjectNames, TierContext, TierError

# A process that has not renewed its signature for this many intervals counts as dead.
_SILENT_INTERVALS = 3
# Tolerance for listed times, because a server may round them to whole seconds.
_RESOLUTION_S = 1.0
# The maximum number of chunks that one sweep deletes. A sweep keeps up to twice as many names in
# memory. If more chunks must be deleted, the next sweep follows at once.
_MOST_VICTIMS = 100_000
_SIGN_OFF_S = 2.0


class Sweeper:
    """A task that deletes old chunks at intervals, in one of the processes that share a prefix.

    At each interval, every process writes a small object, its signature, under a name that begins
    with the process's start time. Among recent signatures, the smallest name elects the process
    that deletes chunks. Ages come from the server's listing, not from a process's clock. If two
    elected processes act in one interval, both delete the same oldest chunks.
    """

    def __init__(
        self,
        config: S3TierConfig,
        context: TierContext,
        bucket: Bucket,
        objects: Objects,
        names: ObjectNames,
    ) -> None:
        self._config = config
        self._context = context
        self._bucket = bucket
        self._objects = objects
        self._names = names
        # The start time comes first, so that the oldest process stays elected.
        started_ms = int(context.clock.wall_s() * 1000)
        self._signatures = f"{names.root}sweepers/"
        self._signature = f"{self._signatures}{started_ms:013x}-{uuid.uuid4().hex}"
        self._has_signed = False
        self._task = context.clock.spawn(self._run(), name="sweeper")

    async def close(self) -> None:
        """Stop, and delete the signature, so that another process takes over at once."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._has_signed:
            with suppress(TierError, TimeoutError):
                async with self._context.clock.timeout(_SIGN_OFF_S):
                    await self._bucket.delete([self._signature])

    async def _run(self) -> None:
        while True:
            has_more = False
            try:
                # Check in each turn, because an operator may set limits while the engine runs.
                if self._config.capacity_bytes is not None or self._config.max_age_s is not None:
                    has_more = await self._take_turn()
            except TierError as error:
                self._context.logger.warning("capacity and max_age were not kept: %s", error)
            except Exception:
                self._context.logger.exception("capacity and max_age were not kept")
            if not has_more:
                await self._context.clock.sleep(self._config.sweep_interval_s)

    async def _take_turn(self) -> bool:
        """Renew the signature, and sweep if elected. Return true if victims may remain."""
        self._has_signed = True
        await self._objects.write(self._signature, [b"{}"])
        signed = {
            found.name: found.modified_s async for found in self._bucket.listing(self._signatures)
        }
        now_s = signed.get(self._signature)
        if now_s is None:
            return False  # another process deleted the signature; the next turn writes it again
        silent_s = now_s - _RESOLUTION_S - _SILENT_INTERVALS * self._config.sweep_interval_s
        dead = [name for name, signed_s in signed.items() if signed_s < silent_s]
        if self._signature != min(signed.keys() - dead):
            return False
        await self._bucket.delete(dead)
        return await self._sweep(now_s)

    async def _sweep(self, now_s: float) -> bool:
        total_bytes = 0
        oldest: list[StoredObject] = []
        async for found in self._bucket.listing(self._names.root):
            if self._names.is_chunk(found.name):
                total_bytes += found.size_bytes
                oldest.append(found)
                if len(oldest) >= 2 * _MOST_VICTIMS:
                    oldest = heapq.nsmallest(_MOST_VICTIMS, oldest)
        victims = self._victims(heapq.nsmallest(_MOST_VICTIMS, oldest), total_bytes, now_s)
        for evicted, names in victims.items():
            await self._bucket.delete(names)
            keys = [self._names.key_in(name) for name in names]
            known = [key for key in keys if key is not None]
            self._context.report_removed(known, evicted=evicted, expired=not evicted)
        return sum(map(len, victims.values())) == _MOST_VICTIMS

    def _victims(
        self, oldest: Iterable[StoredObject], total_bytes: int, now_s: float
    ) -> dict[bool, list[str]]:
        """Return the names to delete: expired objects under false, evicted objects under true."""
        capacity_bytes, max_age_s = self._config.capacity_bytes, self._config.max_age_s
        victims: dict[bool, list[str]] = {False: [], True: []}
        for found in oldest:
            is_over = capacity_bytes is not None and total_bytes > capacity_bytes
            has_expired = max_age_s is not None and found.modified_s <= now_s - max_age_s
            if not (is_over or has_expired):
                break
            victims[not has_expired].append(found.name)
            total_bytes -= found.size_bytes
        return victims
