"""Requests that carry a chunk, sent to the server that holds it, wherever that is now."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier_redis.answers import Answer, Kind, command
from kvtier_redis.config import split_host
from kvtier_redis.dialling import Address, Dialler
from kvtier_redis.faults import answer_error
from kvtier_redis.routes import Route
from kvtier_redis.wire import Exchange, Wire
from kvtier_sdk import Clock, ConnectionPool, TierError, TierUnavailableError

# How often one request is sent elsewhere: a resharding needs two, a failover one more.
_MOST_HOPS = 5
_ASKING = command(b"ASKING")
# What a batch moves on a connection before another one, which waits for it, has its turn.
_TURN_BYTES = 2 * 2**20


@dataclass(slots=True)
class _Leg:
    """One server that a request goes to."""

    exchange: Exchange
    address: Address
    is_asking: bool = False


class Carrier:
    """Carries batches of chunks over a few connections to each server.

    Args:
        route: knows which server holds a chunk.
        dialler: makes connections.
        connections: how many to each server.
        object_bytes: length of a chunk with its header.
        clock: runs a batch on several connections.
    """

    def __init__(
        self, route: Route, dialler: Dialler, connections: int, object_bytes: int, clock: Clock
    ) -> None:
        self._route = route
        self._dialler = dialler
        self._connections = connections
        self._turn = max(1, _TURN_BYTES // object_bytes)
        self._clock = clock
        self._pools: dict[Address, ConnectionPool[Wire]] = {}

    async def carry(self, exchanges: Sequence[Exchange]) -> None:
        """Make requests, each to the server of its key. Afterwards each has its outcome.

        Args:
            exchanges: the requests; what a server refused has a ``TierError`` for outcome.

        After a cancellation nothing touches their buffers.
        """
        try:
            await self._carry(exchanges)
        except asyncio.CancelledError:
            # Given up, perhaps for a server that hangs: nothing else would tell.
            self._route.suspect()
            raise
        outcomes = [exchange.outcome for exchange in exchanges]
        if any(isinstance(outcome, TierError) and outcome.retryable for outcome in outcomes):
            self._route.suspect()

    async def _carry(self, exchanges: Sequence[Exchange]) -> None:
        legs = self._legs(exchanges)
        for _ in range(_MOST_HOPS):
            await self._send(legs)
            legs = self._next_legs(legs)
            if not legs:
                break
        for leg in legs:
            leg.exchange.outcome = TierUnavailableError(
                f"sent from node to node {_MOST_HOPS} times"
            )

    def close(self) -> None:
        """Cut all connections."""
        for pool in self._pools.values():
            pool.close()

    def _legs(self, exchanges: Sequence[Exchange]) -> list[_Leg]:
        """Each to the server that the route names."""
        legs = []
        for exchange in exchanges:
            try:
                legs.append(_Leg(exchange, self._route.server_of(exchange.name)))
            except TierError as error:
                exchange.outcome = _bare(error)
        return legs

    def _next_legs(self, legs: Sequence[_Leg]) -> list[_Leg]:
        """Those that a server has sent elsewhere; other refusals become errors."""
        again = []
        for leg in legs:
            answer = leg.exchange.outcome
            if not isinstance(answer, Answer) or answer.kind is not Kind.ERROR:
                continue
            word, _, rest = answer.text.partition(" ")
            try:
                if not self._route.is_cluster or word not in ("MOVED", "ASK"):
                    raise answer_error(answer.text)
                where = _elsewhere(rest, leg.address)
            except TierError as error:
                leg.exchange.outcome = _bare(error)
                continue
            if word == "MOVED":
                self._route.suspect()
            again.append(_Leg(leg.exchange, where, is_asking=word == "ASK"))
        return again

    async def _send(self, legs: Sequence[_Leg]) -> None:
        """Send to each server what goes there, to all of them at once."""
        queues: dict[Address, deque[Exchange]] = {}
        for leg in legs:
            if not leg.is_asking:
                queues.setdefault(leg.address, deque()).append(leg.exchange)
        work: list[Callable[[], Awaitable[None]]] = [
            *(partial(self._empty, address, queue) for address, queue in queues.items()),
            *(partial(self._ask, leg) for leg in legs if leg.is_asking),
        ]
        await self._clock.gather_bounded(work, limit=len(work))

    async def _empty(self, address: Address, queue: deque[Exchange]) -> None:
        """Send what stands in one server's queue, on as many connections as it has."""
        pool = self._pool_of(address)
        count = min(self._connections, len(queue))
        # Each connection gets its share, and not all at once of what is large.
        turn = min(self._turn, math.ceil(len(queue) / count))
        failures = await self._clock.gather_bounded(
            [partial(self._take_turns, pool, queue, turn)] * count, limit=count
        )
        for failure in filter(None, failures):
            while queue:
                queue.popleft().outcome = failure

    async def _take_turns(
        self, pool: ConnectionPool[Wire], queue: deque[Exchange], turn: int
    ) -> TierError | None:
        """Send what stands in a queue, beside others who do; why this one stopped before its end.

        A server that is out of reach is tried once here, not once for each chunk.
        """
        try:
            while queue:
                async with pool.borrow() as wire:
                    await wire.carry(queue, turn)
        except TierError as error:
            return _bare(error)
        return None

    async def _ask(self, leg: _Leg) -> None:
        """Send what a node takes only after an announcement, on the same connection."""
        try:
            async with self._pool_of(leg.address).borrow() as wire:
                await wire.call([_ASKING])
                await wire.carry(deque([leg.exchange]), 1)
        except TierError as error:
            leg.exchange.outcome = _bare(error)

    def _pool_of(self, address: Address) -> ConnectionPool[Wire]:
        if address not in self._pools:
            self._pools[address] = ConnectionPool(
                lambda: self._dialler.dial(address), self._connections
            )
        return self._pools[address]


def _elsewhere(where: str, asked: Address) -> Address:
    """The node of ``<slot> <host>:<port>``; without a host it is the one that was asked."""
    place = where.rpartition(" ")[2]
    try:
        if place.startswith(":"):
            place = f"{asked[0]}{place}"
        return split_host(place, default_port=0)
    except ValueError:
        raise TierUnavailableError(f"a node sent us to {place!r}, which is none") from None


def _bare(error: TierError) -> TierError:
    # Where it came from leads to frames that hold the buffers.
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
