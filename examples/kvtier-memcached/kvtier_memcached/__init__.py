"""A tier that keeps chunks in memcached servers."""

import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from pydantic import Field

import kvtier_sdk as kv
from kvtier_memcached.pieces import Pieces

_LINE_BYTES = 2048


class MemcachedTierConfig(kv.TierConfig):
    """Options of the memcached tier.

    Attributes:
        servers: ``host:port`` of each server, separated by commas. The host of a URL is a single
            server, as in ``memcached://kv-1:11211``.
        piece_bytes: the maximum length of a value; the servers' limit (``-I``) must be larger.
        connections: the maximum number of connections to each server.
        timeout_s: the longest silence of a server before it counts as unreachable.
    """

    servers: str = Field(pattern=r"^[^,:]+:\d{1,5}(,[^,:]+:\d{1,5})*$")
    piece_bytes: kv.Bytes = Field(1_000_000, alias="piece", ge=1024)
    connections: kv.Count = Field(8, ge=1)
    timeout_s: kv.Seconds = Field(1.0, alias="timeout", gt=0)

    @classmethod
    def options_from_url(cls, url: kv.TierURL) -> dict[str, Any]:
        server = None if url.host is None else f"{url.host}:{url.port or 11211}"
        return url.options_beside({"servers": server})


class MemcachedTier(kv.ChunkTierManager):
    """A tier that cuts each chunk into pieces. All pieces of a chunk are on the same server."""

    config_model = MemcachedTierConfig
    locality = kv.Locality.REMOTE
    capabilities = kv.Capability.DELETE
    contract_version = 1
    config: MemcachedTierConfig

    async def open(self) -> None:
        limit, clock = self.config.connections, self.context.clock
        servers = self.config.servers.split(",")
        self.fan_out = limit * len(servers)
        self._calls = kv.RunningCalls()
        self._pools = {s: kv.ConnectionPool(partial(self._dial, s), limit) for s in servers}
        self._pieces = Pieces(self, most_bytes=self.config.piece_bytes, clock=clock)
        for server in servers:
            async with self._pools[server].borrow() as connection:
                await connection.send([b"stats settings\r\n"])
                text = await connection.receive_until(b"END\r\n", most_bytes=2**16)
            found = re.search(rb"item_size_max (\d+)", text)
            # Add 512 bytes, because an item also contains the value's name and a header.
            if found and int(found[1]) < self.config.piece_bytes + 512:
                raise kv.ConfigError(f"option 'piece': {server} takes items up to {int(found[1])}")

    async def lookup(self, keys: Sequence[bytes], request: kv.RequestContext) -> Sequence[bool]:
        # A server that is down must fail only its own keys.
        async def ask(key: bytes) -> bool | kv.TierError:
            try:
                return await self.contains_chunk(key)
            except kv.TierError as error:
                return error.detached()

        calls = [partial(ask, key) for key in keys]
        found = await self.context.clock.gather_bounded(calls, limit=self.fan_out)
        kv.check_any_answered(found)
        return [one is True for one in found]

    async def contains_chunk(self, key: kv.OffloadKey) -> bool:
        return await self._pieces.contains(self._name(key))

    async def store_chunk(self, transfer: kv.Transfer) -> None:
        name, buffers = self._name(transfer.key), transfer.buffers
        await self._pieces.store(name, buffers, replace=transfer.replace)

    async def load_chunk(self, transfer: kv.Transfer) -> None:
        transfer.received(await self._pieces.load(self._name(transfer.key), transfer.buffers))

    async def delete_chunk(self, key: kv.OffloadKey) -> None:
        await self._pieces.remove(self._name(key))

    async def close(self) -> None:
        if hasattr(self, "_pieces"):
            await self._calls.close()
            for pool in self._pools.values():
                pool.close()

    # The next four methods implement `ValueStore` for `Pieces`, with memcached's meta commands.

    async def get(self, name: str, buffers: Sequence[memoryview]) -> None:
        async with self._asked(name, b"mg %b v\r\n" % name.encode()) as (connection, reply):
            if reply[0] == b"VA":
                if int(reply[1]) != sum(map(len, buffers)):
                    raise kv.CorruptChunkError("a value of another length")
                await connection.receive([*buffers, memoryview(bytearray(2))])
        if reply[0] != b"VA":
            raise kv.ChunkNotFoundError("no such value")

    async def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        command = b"ms %b %d\r\n" % (name.encode(), sum(map(len, buffers)))
        async with self._asked(name, command, *buffers, b"\r\n"):
            pass

    async def has(self, name: str) -> bool:
        async with self._asked(name, b"mg %b\r\n" % name.encode()) as (_, reply):
            return reply[0] == b"HD"

    async def remove(self, name: str) -> None:
        async with self._asked(name, b"md %b\r\n" % name.encode()):
            pass

    @asynccontextmanager
    async def _asked(
        self, name: str, *request: bytes | memoryview
    ) -> AsyncIterator[tuple[kv.Connection, list[bytes]]]:
        pool, is_store = self._pools[self._server_of(name)], len(request) > 1
        async with self._calls, pool.borrow(for_store=is_store) as connection:
            await connection.send(request)
            line = await connection.receive_until(b"\r\n", most_bytes=_LINE_BYTES)
            if line[:3] not in (b"HD\r", b"EN\r", b"NF\r", b"VA "):
                is_full = line.startswith(b"SERVER_ERROR out of memory")
                error = kv.TierCapacityError if is_full else kv.TierUnavailableError
                raise error(f"the server replied: {line.decode(errors='replace').strip()}")
            yield connection, line.split()

    async def _dial(self, server: str) -> kv.Connection:
        host, _, port = server.rpartition(":")
        clock, limit_s = self.context.clock, self.config.timeout_s
        return await kv.Connection.connect(
            (host, int(port)), clock=clock, timeout_s=limit_s, stall_timeout_s=limit_s
        )

    def _name(self, key: kv.OffloadKey) -> str:
        return hashlib.sha256(self.context.namespace.fingerprint.encode() + key).hexdigest()

    def _server_of(self, name: str) -> str:
        # Select the server by the prefix that the names of a chunk's index and pieces share.
        chunk = name.partition(".")[0]
        return max(self._pools, key=lambda s: hashlib.md5(f"{s} {chunk}".encode()).digest())
