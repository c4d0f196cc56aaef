"""Sends requests to the servers of the requested chunks, and follows redirects."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier_redis.config import split_host
from kvtier_redis.connector import Address
from kvtier_redis.faults import reply_error
from kvtier_redis.resp import Exchange, Kind, Reply, call, run_some
from kvtier_redis.routes import Route
from kvtier_sdk import Clock, Connection, ConnectionPool, TierError, TierUnavailableError

# The maximum number of servers that a request visits. Resharding needs two, a failover three.
_MOST_HOPS = 5


@dataclass(slots=True)
class _Hop:
    """A request to one server. If ``is_asking``, the command ``ASKING`` precedes the request."""

    exchange: Exchange
    address: Address
    is_asking: bool = False


@dataclass
class Dispatcher:
    """Sends batches of requests, over up to ``connections`` connections to each server.

    A batch uses one connection per ``share`` requests. After ``turn`` requests on a connection, the
    batch lets another batch use the connection.
    """

    route: Route
    connect: Callable[[Address], Awaitable[Connection]]
    connections: int
    turn: int
    share: int
    clock: Clock
    _pools: dict[Address, ConnectionPool[Connection]] = field(default_factory=dict, init=False)

    async def run(self, exchanges: Sequence[Exchange]) -> None:
        """Send each request to the server of the request's key, and set the request's outcome."""
        try:
            await self._run(exchanges)
        except asyncio.CancelledError:
            # The caller may have given up on a hanging server, so search for the servers again.
            self.route.suspect()
            raise
        outcomes = [exchange.outcome for exchange in exchanges]
        if any(isinstance(outcome, TierError) and outcome.retryable for outcome in outcomes):
            self.route.suspect()

    async def _run(self, exchanges: Sequence[Exchange]) -> None:
        hops = []
        for exchange in exchanges:
            try:
                hops.append(_Hop(exchange, self.route.server_of(exchange.name)))
            except TierError as error:
                exchange.outcome = error.detached()
        for _ in range(_MOST_HOPS):
            await self._send(hops)
            hops = self._next_hops(hops)
            if not hops:
                break
        for hop in hops:
            hop.exchange.outcome = TierUnavailableError(
                f"sent from node to node {_MOST_HOPS} times"
            )

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _next_hops(self, hops: Sequence[_Hop]) -> list[_Hop]:
        """Return the requests that a server redirected; other error replies become TierErrors."""
        again = []
        for hop in hops:
            reply = hop.exchange.outcome
            if not isinstance(reply, Reply) or reply.kind is not Kind.ERROR:
                continue
            word, _, rest = reply.text.partition(" ")
            try:
                if not self.route.is_cluster or word not in ("MOVED", "ASK"):
                    raise reply_error(reply.text)
                address = _redirect_address(rest, hop.address)
            except TierError as error:
                hop.exchange.outcome = error.detached()
                continue
            if word == "MOVED":
                self.route.suspect()
            hop.exchange.outcome = None
            again.append(_Hop(hop.exchange, address, is_asking=word == "ASK"))
        return again

    async def _send(self, hops: Sequence[_Hop]) -> None:
        queues: dict[Address, deque[Exchange]] = {}
        for hop in hops:
            if not hop.is_asking:
                queues.setdefault(hop.address, deque()).append(hop.exchange)
        work: list[Callable[[], Awaitable[None]]] = [
            *(partial(self._empty, address, queue) for address, queue in queues.items()),
            *(partial(self._ask, hop) for hop in hops if hop.is_asking),
        ]
        await self.clock.gather_bounded(work, limit=len(work))

    async def _empty(self, address: Address, queue: deque[Exchange]) -> None:
        """Send all requests in one server's queue, over several connections."""
        pool = self._pool_of(address)
        count = min(self.connections, math.ceil(len(queue) / self.share))
        # Limit a turn to an even share of the queue, so that all connections get requests.
        turn = min(self.turn, math.ceil(len(queue) / count))
        failures = await self.clock.gather_bounded(
            [partial(self._take_turns, pool, queue, turn)] * count, limit=count
        )
        for failure in filter(None, failures):
            while queue:
                queue.popleft().outcome = failure

    async def _take_turns(
        self, pool: ConnectionPool[Connection], queue: deque[Exchange], turn: int
    ) -> TierError | None:
        """Send a shared queue's requests until it is empty; return an error if connecting fails."""
        # Stop at an error, so that an unreachable server is not tried again for each chunk.
        try:
            while queue:
                async with pool.borrow() as connection:
                    await run_some(connection, queue, turn)
        except TierError as error:
            return error.detached()
        return None

    async def _ask(self, hop: _Hop) -> None:
        """Send a request that the node accepts only after ``ASKING`` on the same connection."""
        try:
            async with self._pool_of(hop.address).borrow() as connection:
                await call(connection, b"ASKING")
                await run_some(connection, deque([hop.exchange]), 1)
        except TierError as error:
            hop.exchange.outcome = error.detached()

    def _pool_of(self, address: Address) -> ConnectionPool[Connection]:
        if address not in self._pools:
            self._pools[address] = ConnectionPool(lambda: self.connect(address), self.connections)
        return self._pools[address]


def _redirect_address(where: str, asked: Address) -> Address:
    """Return the address in ``<slot> <host>:<port>``; an empty host means the host of ``asked``."""
    place = where.rpartition(" ")[2]
    try:
        if place.startswith(":"):
            place = f"{asked[0]}{place}"
        return split_host(place, default_port=0)
    except ValueError:
        raise TierUnavailableError(
            f"a node redirected a request to {place!r}, which is not an address"
        ) from None
