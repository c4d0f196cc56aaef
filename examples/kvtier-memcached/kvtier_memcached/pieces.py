"""Keeps large objects, cut into pieces, in a store that limits the length of a value."""

from __future__ import annotations

import os
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from kvtier_sdk import ChunkError, ChunkNotFoundError, Clock, CorruptChunkError, TierError

T = TypeVar("T")

#: The minimum of ``most_bytes``, because a lower limit could lead to millions of pieces.
LEAST_PIECE_BYTES = 1024
_VERSION_BYTES = 16


class ValueStore(Protocol):
    """A store of named values for :class:`Pieces`. A method that fails raises ``TierError``."""

    async def get(self, name: str, buffers: Sequence[memoryview], /) -> None:
        """Fill buffers, one after the other, with a value.

        Raises:
            ChunkNotFoundError: no value has this name.
            CorruptChunkError: the value is shorter or longer than the buffers.
        """

    async def put(self, name: str, buffers: Sequence[memoryview], /) -> None:
        """Store the joined buffers as one value. A reader never sees a part of the value."""

    async def has(self, name: str, /) -> bool:
        """Return true if a value has this name."""

    async def remove(self, name: str, /) -> None:
        """Remove a value. A missing value is ignored."""


class _Index(NamedTuple):
    """The index of an object, stored under the object's name. It determines the pieces' names."""

    #: Random bytes in the names of the pieces, new for each store of the object.
    version: bytes
    #: Length of each piece; the last piece may be shorter.
    piece_bytes: int
    object_bytes: int

    def pieces(self, name: str) -> list[str]:
        """Return the names of the pieces, in order."""
        count = -(-self.object_bytes // self.piece_bytes)
        return [f"{name}.{self.version.hex()}.{number}" for number in range(count)]


_FORMAT = struct.Struct(f">{_VERSION_BYTES}sQQ")


class Pieces:
    """Objects of any length in a store whose values have a size limit.

    :meth:`store` first writes an object's pieces under names that contain a new random version.
    Then it writes a small index under the object's own name. So a load never mixes two versions,
    and a store that fails midway leaves the old object whole. After concurrent stores one whole
    object remains. If a piece is lost, the object counts as missing. ``MemcachedTier`` shows how a
    tier uses this class.

    A piece's name is the object's name, a dot and up to 59 further characters. If a writer is
    killed, or another writer overwrites the index, some pieces may belong to no index. Nothing
    removes these pieces, so the value store should evict values, or let them expire.

    Args:
        values: the store of the pieces and indices.
        most_bytes: the maximum length of a value; at least 1,024 bytes.
        clock: the clock whose ``gather_bounded`` makes concurrent calls of the store.
        at_once: the maximum number of concurrent calls for one object.

    Raises:
        ValueError: ``most_bytes`` is too small.
    """

    def __init__(
        self, values: ValueStore, *, most_bytes: int, clock: Clock, at_once: int = 4
    ) -> None:
        if most_bytes < LEAST_PIECE_BYTES:
            raise ValueError(f"most_bytes is {most_bytes}; at least {LEAST_PIECE_BYTES}")
        self._values = values
        self._most_bytes = most_bytes
        self._clock = clock
        self._at_once = at_once

    async def contains(self, name: str) -> bool:
        """Return true if an object exists with all its pieces.

        Raises:
            CorruptChunkError: the value under ``name`` is not an index.
            TierError: a call of the store failed.
        """
        try:
            index = await self._index(name)
        except ChunkNotFoundError:
            return False
        return await self._is_whole(index, name)

    async def store(
        self, name: str, buffers: Sequence[memoryview], *, replace: bool = False
    ) -> None:
        """Store the joined buffers as an object.

        An existing whole object is kept unless ``replace`` is true. After an error or a
        cancellation nothing reads the buffers, and the name has either its old or the new object.
        """
        try:
            index = await self._index(name)
        except ChunkError:
            old = []
        else:
            if not replace and await self._is_whole(index, name):
                return
            old = index.pieces(name)
        index = _Index(os.urandom(_VERSION_BYTES), self._most_bytes, sum(map(len, buffers)))
        cut = _cut(buffers, self._most_bytes)
        pieces = zip(index.pieces(name), cut, strict=True)
        await self._each([partial(self._values.put, at, piece) for at, piece in pieces])
        await self._values.put(name, [memoryview(_FORMAT.pack(*index))])
        await self._each([partial(self._values.remove, at) for at in old])

    async def load(self, name: str, buffers: Sequence[memoryview]) -> int:
        """Fill buffers, one after the other, with an object, and return the object's length.

        The object may be shorter than the buffers. After an error or a cancellation nothing writes
        to the buffers. Their content is undefined.

        Raises:
            ChunkNotFoundError: the object or one of its pieces is missing.
            CorruptChunkError: the object is longer than the buffers, or the value under ``name`` is
                not an index.
            TierError: the object could not be read.
        """
        index = await self._index(name)
        most_bytes = sum(map(len, buffers))
        if index.object_bytes > most_bytes:
            raise CorruptChunkError(f"{index.object_bytes} bytes stored; at most {most_bytes} fit")
        cut = _cut(_first(buffers, index.object_bytes), index.piece_bytes)
        pieces = zip(index.pieces(name), cut, strict=True)
        await self._each([partial(self._values.get, at, piece) for at, piece in pieces])
        return index.object_bytes

    async def remove(self, name: str) -> None:
        """Remove an object. A missing object is ignored.

        Raises:
            TierError: some values remain. If the index was removed, the object counts as missing.
        """
        try:
            pieces = (await self._index(name)).pieces(name)
        except ChunkError:
            pieces = []
        # Remove the index first, so that no reader follows it to removed pieces.
        await self._values.remove(name)
        await self._each([partial(self._values.remove, at) for at in pieces])

    async def _index(self, name: str) -> _Index:
        value = bytearray(_FORMAT.size)
        await self._values.get(name, [memoryview(value)])
        index = _Index(*_FORMAT.unpack(value))
        if index.piece_bytes < LEAST_PIECE_BYTES:
            raise CorruptChunkError("the value under the chunk's name is not an index of pieces")
        return index

    async def _is_whole(self, index: _Index, name: str) -> bool:
        return all(await self._each([partial(self._values.has, at) for at in index.pieces(name)]))

    async def _each(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Make all calls, and return their results or raise the first failure."""

        # Let all calls end after a failure, because a cancelled call may lose its connection.
        async def outcome(call: Callable[[], Awaitable[T]]) -> T | TierError:
            try:
                return await call()
            except TierError as error:
                return error

        outcomes = await self._clock.gather_bounded(
            [partial(outcome, call) for call in calls], limit=self._at_once
        )
        results = []
        for one in outcomes:
            if isinstance(one, TierError):
                raise one
            results.append(one)
        return results


def _first(buffers: Iterable[memoryview], count_bytes: int) -> Iterator[memoryview]:
    """Yield views of the first ``count_bytes`` bytes across all buffers."""
    for buffer in buffers:
        yield buffer[:count_bytes]
        count_bytes = max(0, count_bytes - len(buffer))


def _cut(buffers: Iterable[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """Cut buffers into pieces of ``most_bytes`` without a copy. The last piece may be shorter."""
    piece: list[memoryview] = []
    room = most_bytes
    for buffer in buffers:
        while len(buffer):
            piece.append(buffer[:room])
            buffer = buffer[len(piece[-1]) :]
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], most_bytes
    if piece:
        yield piece
