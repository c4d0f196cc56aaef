"""Objects in pieces are whole or missing, never a mixture of two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvtier_memcached.pieces import Pieces
from kvtier_sdk import (
    ChunkNotFoundError,
    CorruptChunkError,
    SystemClock,
    TierUnavailableError,
)

MOST_BYTES = 1024


class Values:
    """A value store in a dictionary. Each call yields to the event loop once."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.puts_left: int | None = None

    async def get(self, name: str, buffers: Sequence[memoryview]) -> None:
        value = await self._reach(name)
        if value is None:
            raise ChunkNotFoundError("no such value")
        if len(value) != sum(map(len, buffers)):
            raise CorruptChunkError("another length")
        for buffer in buffers:
            buffer[:], value = value[: len(buffer)], value[len(buffer) :]

    async def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        await self._reach(name)
        if self.puts_left is not None:
            if not self.puts_left:
                raise TierUnavailableError("killed")
            self.puts_left -= 1
        value = b"".join(buffers)
        assert len(value) <= MOST_BYTES
        self.kept[name] = value

    async def has(self, name: str) -> bool:
        return await self._reach(name) is not None

    async def remove(self, name: str) -> None:
        await self._reach(name)
        self.kept.pop(name, None)

    async def _reach(self, name: str) -> bytes | None:
        await asyncio.sleep(0)
        return self.kept.get(name)


@pytest.fixture
def values() -> Values:
    return Values()


@pytest.fixture
def pieces(values: Values) -> Pieces:
    return Pieces(values, most_bytes=MOST_BYTES, clock=SystemClock())


def an_object(seed: int, payload_bytes: int = 5000) -> list[memoryview]:
    """Return a header and a payload. Objects with different seeds differ in every byte."""
    payload = bytes((seed + at) % 251 for at in range(payload_bytes))
    return [memoryview(bytes([seed]) * 64), memoryview(payload)]


async def loaded(pieces: Pieces, payload_bytes: int = 5000) -> bytes:
    rooms = [memoryview(bytearray(64)), memoryview(bytearray(payload_bytes))]
    object_bytes = await pieces.load("a", rooms)
    return b"".join(rooms)[:object_bytes]


@pytest.mark.parametrize("payload_bytes", [0, 1, 959, 960, 961, 1024, 5000, 100_000])
async def test_an_object_of_any_length_comes_back(pieces, values, payload_bytes):
    await pieces.store("a", an_object(7, payload_bytes))
    assert await pieces.contains("a")
    for room_bytes in (payload_bytes, payload_bytes + 1, 200_000):
        assert await loaded(pieces, room_bytes) == b"".join(an_object(7, payload_bytes))
    assert max(map(len, values.kept.values())) <= MOST_BYTES
    await pieces.remove("a")
    assert not values.kept


async def test_the_first_object_stays_unless_it_is_to_be_replaced(pieces, values):
    await pieces.store("a", an_object(1))
    await pieces.store("a", an_object(2))
    assert await loaded(pieces) == b"".join(an_object(1))
    for payload_bytes, count in ((5000, 6), (900, 2), (4000, 5)):
        await pieces.store("a", an_object(2, payload_bytes), replace=True)
        assert await loaded(pieces) == b"".join(an_object(2, payload_bytes))
        assert len(values.kept) == count


@pytest.mark.parametrize("puts", range(6))
async def test_a_store_that_fails_midway_changes_nothing(pieces, values, puts):
    await pieces.store("a", an_object(1))
    values.puts_left = puts
    with pytest.raises(TierUnavailableError):
        await pieces.store("a", an_object(2), replace=True)
    assert await loaded(pieces) == b"".join(an_object(1))


@pytest.mark.parametrize("index", [b"", b"not an index", bytes(32)])
async def test_a_value_that_is_no_index_is_corrupt_and_can_be_replaced(pieces, values, index):
    values.kept["a"] = index
    for call in (pieces.contains("a"), loaded(pieces)):
        with pytest.raises(CorruptChunkError):
            await call
    await pieces.store("a", an_object(1))
    assert await loaded(pieces) == b"".join(an_object(1))
    values.kept["a"] = index
    await pieces.remove("a")
    assert "a" not in values.kept


async def test_an_object_in_pieces_of_another_size_is_read_too(pieces, values):
    other = Pieces(values, most_bytes=1030, clock=SystemClock())
    await pieces.store("a", an_object(1))
    assert await loaded(other) == b"".join(an_object(1))


def test_a_limit_that_makes_millions_of_pieces_is_refused(values):
    with pytest.raises(ValueError, match="most_bytes is 1023; at least 1024"):
        Pieces(values, most_bytes=1023, clock=SystemClock())
