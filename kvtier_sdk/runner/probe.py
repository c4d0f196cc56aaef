"""Tries a tier with a chunk that belongs to no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.contract import TierContext
from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.breaker import Direction, Outcome, outcome_of
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.types import OffloadKey, RequestContext, Transfer, make_offload_key

#: A key that no engine makes: no hash is text, and no model has that many KV-cache groups.
CANARY_KEY: OffloadKey = make_offload_key(b"kvtier canary".ljust(32, b"\0"), 0xFFFF_FFFF)

_PROBER = RequestContext("kvtier probe")


class Canary:
    """Calls a tier as requests do, with a key and buffers of its own."""

    def __init__(
        self,
        call: TierCaller,
        context: TierContext,
        header: ChunkHeader,
        memory: BufferArena,
        *,
        can_delete: bool,
        lookup_deadline_s: float,
    ) -> None:
        self._call = call
        self._context = context
        self._header = header
        self._memory = memory
        self._can_delete = can_delete
        self._lookup_deadline_s = lookup_deadline_s

    async def try_out(self, direction: Direction) -> None:
        """Try one direction.

        Raises:
            TierError: the tier does not work.
            TimeoutError: it is too slow to be of use.
        """
        if direction is Direction.READ:
            await self._look(self._context.clock)
            await self._move(Operation.LOAD, direction)
            return
        await self._move(Operation.STORE, direction)
        if self._can_delete:
            # Stores work, even if this fails.
            with contextlib.suppress(TierError):
                await self._call.delete([CANARY_KEY])

    async def _look(self, clock: Clock) -> None:
        asked_s = clock.now_s()
        await self._call.lookup([CANARY_KEY], _PROBER)
        # The first call may have had to reconnect, which must not be cut short. The second one need
        # not, and must be as quick as a request's lookup.
        if clock.now_s() - asked_s > self._lookup_deadline_s:
            async with clock.timeout(self._lookup_deadline_s):
                await self._call.lookup([CANARY_KEY], _PROBER)

    async def _move(self, operation: Operation, direction: Direction) -> None:
        # An absent or damaged chunk is an answer too: a load needs no stored canary.
        with self._transfer() as transfer:
            if operation is Operation.STORE:
                self._header.seal(CANARY_KEY, transfer.header, transfer.payload)
            errors = await self._call.transfer(operation, [transfer])
        if outcome_of(direction, errors) is not Outcome.ANSWERED:
            for error in filter(None, errors):
                raise error

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[Transfer]:
        """Lend a transfer until the tier's call has ended."""
        split = self._context.header_bytes
        (memory,) = lent = self._memory.take(1)
        try:
            # A canary stored by an earlier probe says nothing about the tier now.
            yield Transfer(CANARY_KEY, _PROBER, memory[:split], memory[split:], replace=True)
        finally:
            self._memory.give_back(lent)
