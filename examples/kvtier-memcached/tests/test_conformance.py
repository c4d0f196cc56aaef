"""The memcached tier meets the contract on a real server, with chunks of several pieces."""

import hashlib

import pytest
from memcached_server import MemcachedServer

from kvtier_memcached.pieces import Pieces
from kvtier_sdk import ChunkNotFoundError, CorruptChunkError, SystemClock
from kvtier_sdk.testing import TierConformance

PIECE_BYTES = 30_000


class TestMemcachedTier(TierConformance):
    chunk_bytes = 100_000

    @pytest.fixture
    def tier(self):
        self.server = MemcachedServer().start()
        self.small = MemcachedServer("-m", "4")
        yield f"{self.server.url}?piece={PIECE_BYTES}B&timeout=300ms"
        self.server.kill()
        self.small.kill()

    async def read_raw(self, key):
        room = bytearray(64 + self.chunk_bytes)
        try:
            object_bytes = await self._objects().load(self._name(key), [memoryview(room)])
        except ChunkNotFoundError:
            return None
        return bytes(room[:object_bytes])

    async def write_raw(self, key, data):
        await self._objects().store(self._name(key), [memoryview(data)], replace=True)

    def lose_part(self, key):
        pieces = [name for name in self.server.names() if name.startswith(f"{self._name(key)}.")]
        self.server.ask(f"md {sorted(pieces)[1]}".encode())

    def break_connection(self):
        self.server.kill()

    def restore_connection(self):
        self.server.start()

    def freeze(self):
        self.server.pause()

    def unfreeze(self):
        self.server.resume()

    def bad_settings(self):
        return {"pieces beyond the servers' limit": f"{self.server.url}?piece=1MiB"}

    def small_tier(self, object_bytes):
        return f"{self.small.start().url}?piece={PIECE_BYTES}B"

    def _name(self, key):
        return hashlib.sha256(self.namespace.fingerprint.encode() + key).hexdigest()

    def _objects(self):
        return Pieces(Values(self.server), most_bytes=PIECE_BYTES, clock=SystemClock())


class Values:
    """A value store for :class:`Pieces` that bypasses the tier."""

    def __init__(self, server):
        self._ask = server.ask

    async def get(self, name, buffers):
        line, value = self._ask(f"mg {name} v".encode())
        if not line.startswith(b"VA"):
            raise ChunkNotFoundError(name)
        if len(value) != sum(map(len, buffers)):
            raise CorruptChunkError(name)
        for buffer in buffers:
            buffer[:], value = value[: len(buffer)], value[len(buffer) :]

    async def put(self, name, buffers):
        data = b"".join(buffers)
        assert self._ask(f"ms {name} {len(data)}".encode(), data)[0] == b"HD\r\n"

    async def has(self, name):
        return self._ask(f"mg {name}".encode())[0] == b"HD\r\n"

    async def remove(self, name):
        self._ask(f"md {name}".encode())
