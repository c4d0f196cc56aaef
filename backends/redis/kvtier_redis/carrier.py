"""Requests that carry a chunk, sent to the server that holds it, wherever that is now."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_redis.answers import Answer, Kind, command
from kvtier_redis.config import split_host
from kvtier_redis.faults import answer_error
from kvtier_redis.lanes import Address, Dialler, Lanes
from kvtier_redis.routes import Route
from kvtier_sdk import TierError, TierUnavailableError

# How often one request is sent elsewhere: a resharding needs two, a failover one more.
_MOST_HOPS = 5
_ASKING = command(b"ASKING")


class Carrier:
    """Carries chunks over a few connections to each server.

    Args:
        route: knows which server holds a chunk.
        dialler: makes connections.
        connections: how many to each server.
    """

    def __init__(self, route: Route, dialler: Dialler, connections: int) -> None:
        self._route = route
        self._dialler = dialler
        self._connections = connections
        self._lanes: dict[Address, Lanes] = {}

    async def call(
        self,
        name: bytes,
        parts: Sequence[bytes | memoryview],
        target: Sequence[memoryview] = (),
    ) -> Answer:
        """Send a request about one key and receive its answer.

        Args:
            name: the server's key.
            parts: the request.
            target: where a value goes that is exactly so long.

        Returns:
            The answer, no error among them.

        Raises:
            TierError: the server refused, or could not be reached.

        After a cancellation nothing touches the buffers.
        """
        try:
            address = await self._route.server_of(name)
            return await self._follow(address, parts, target)
        except TierError as error:
            if error.retryable:
                self._route.suspect()
            raise

    def close(self) -> None:
        """Cut all connections."""
        for lanes in self._lanes.values():
            lanes.close()

    async def _follow(
        self,
        address: Address,
        parts: Sequence[bytes | memoryview],
        target: Sequence[memoryview],
    ) -> Answer:
        is_asking = False
        for _ in range(_MOST_HOPS):
            answer = await self._ask(address, parts, target, is_asking=is_asking)
            if answer.kind is not Kind.ERROR:
                return answer
            word, _, rest = answer.text.partition(" ")
            if not self._route.is_cluster or word not in ("MOVED", "ASK"):
                raise answer_error(answer.text)
            is_asking = word == "ASK"
            if not is_asking:
                self._route.suspect()
            address = _elsewhere(rest, address)
        raise TierUnavailableError(f"sent from node to node {_MOST_HOPS} times")

    async def _ask(
        self,
        address: Address,
        parts: Sequence[bytes | memoryview],
        target: Sequence[memoryview],
        *,
        is_asking: bool,
    ) -> Answer:
        if address not in self._lanes:
            self._lanes[address] = Lanes(lambda: self._dialler.dial(address), self._connections)
        async with self._lanes[address].lane() as wire:
            if is_asking:
                await wire.call([_ASKING])
            return await wire.call(parts, target)


def _elsewhere(where: str, asked: Address) -> Address:
    """The node of ``<slot> <host>:<port>``; without a host it is the one that was asked."""
    place = where.rpartition(" ")[2]
    try:
        if place.startswith(":"):
            place = f"{asked[0]}{place}"
        return split_host(place, default_port=0)
    except ValueError:
        raise TierUnavailableError(f"a node sent us to {place!r}, which is none") from None
