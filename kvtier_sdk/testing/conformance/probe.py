"""An open tier as the checks see it: every call bounded, every answer looked at."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier_sdk.aio.clock import wait_out
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import (
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    TierCapacityError,
    TierError,
)
from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.rules import Breach
from kvtier_sdk.types import Entry, OffloadKey, RequestContext

if TYPE_CHECKING:
    from kvtier_sdk.testing.conformance.subject import TierSubject

T = TypeVar("T")

REQUEST = RequestContext("conformance")
#: So much of a chunk tells which one it is of.
PIECE_BYTES = 16


def content_of(key: OffloadKey, version: int, size_bytes: int) -> bytes:
    """What a chunk holds in a check: bytes that tell key, version and place.

    Args:
        key: the chunk's.
        version: tells apart what was stored under one key.
        size_bytes: how many.

    Returns:
        Those bytes.
    """
    seed = len(key).to_bytes(4, "big") + key + version.to_bytes(4, "big")
    return hashlib.shake_128(seed).digest(size_bytes)


class Probe:
    """Calls one tier, and tells a breach from an answer.

    What a tier raises for a whole batch is given as the verdict on each chunk, as the SDK does.

    Args:
        subject: whose tier it is.
        tier: the instance.
    """

    def __init__(self, subject: TierSubject, tier: SecondaryTierManager) -> None:
        self.subject = subject
        self.tier = tier
        self.object_bytes = tier.context.object_bytes
        self._closed = False

    async def open(self) -> None:
        """Open the tier."""
        await self.bounded(self.tier.open(), "open")

    async def close(self) -> None:
        """Close the tier."""
        self._closed = True
        await self.bounded(self.tier.close(), "close")

    async def clean_up(self) -> None:
        """Close the tier unless that was done; how it goes is the business of other checks."""
        if not self._closed:
            with contextlib.suppress(Breach, TierError):
                await self.close()

    async def lookup(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """As the tier's."""
        answers = await self.bounded(self.tier.lookup(keys, REQUEST), "lookup")
        self._count(answers, len(keys), "lookup")
        return [bool(answer) for answer in answers]

    async def store(self, batch: Sequence[LentBuffers]) -> list[TierError | None]:
        """As the tier's."""
        return await self._move("store", batch)

    async def load(self, batch: Sequence[LentBuffers]) -> list[TierError | None]:
        """As the tier's."""
        return await self._move("load", batch)

    async def scan(self) -> list[Entry]:
        """As the tier's, to its end."""

        async def listed() -> list[Entry]:
            return [entry async for entry in self.tier.scan()]

        return await self.bounded(listed(), "scan")

    def empty(self, key: OffloadKey, *, shift_bytes: int = 0) -> LentBuffers:
        """Buffers to load into."""
        context = self.tier.context
        return LentBuffers(
            key,
            REQUEST,
            header_bytes=context.header_bytes,
            payload_bytes=context.payload_bytes,
            shift_bytes=shift_bytes,
        )

    def full(self, key: OffloadKey, version: int = 0, *, shift_bytes: int = 0) -> LentBuffers:
        """Buffers that hold a version of a chunk."""
        lent = self.empty(key, shift_bytes=shift_bytes)
        lent.fill(self.content(key, version))
        return lent

    def content(self, key: OffloadKey, version: int = 0) -> bytes:
        """What a version of a chunk holds."""
        return content_of(key, version, self.object_bytes)

    async def put(self, keys: Iterable[OffloadKey], version: int = 0) -> list[OffloadKey]:
        """Store chunks, one call for all.

        Args:
            keys: of the chunks.
            version: which content.

        Returns:
            Those that the tier took.

        Raises:
            Breach: it refused one for another reason than room.
        """
        batch = [self.full(key, version) for key in keys]
        verdicts = await self.store(batch)
        for verdict in verdicts:
            if verdict is not None and not isinstance(verdict, TierCapacityError):
                raise Breach(f"the tier is well, and yet a store failed with {told(verdict)}")
        kept = [lent.key for lent, verdict in zip(batch, verdicts, strict=True) if verdict is None]
        if batch and not kept and self.subject.keeps_chunks:
            raise Breach(f"an empty tier refused every store: {told(verdicts[0])}")
        return kept

    async def put_one(self, version: int = 0) -> OffloadKey | None:
        """Store a chunk under a new key; ``None`` where the tier has no room."""
        kept = await self.put(self.subject.new_keys(1), version)
        return kept[0] if kept else None

    async def get(self, key: OffloadKey) -> bytes | TierError:
        """Load a chunk: what it holds, or why it could not be had."""
        lent = self.empty(key)
        (verdict,) = await self.load([lent])
        return lent.content if verdict is None else verdict

    async def expect(self, key: OffloadKey, *versions: int, may_miss: bool = False) -> None:
        """Load a chunk, which must be one of some versions.

        Args:
            key: the chunk.
            versions: that it may hold.
            may_miss: whether it may also be absent or known to be damaged.

        Raises:
            Breach: it is not.
        """
        found = await self.get(key)
        if isinstance(found, TierError):
            if may_miss and is_miss(found):
                return
            raise Breach(f"a chunk that was stored cannot be loaded: {told(found)}")
        self.judge(key, found, versions)

    def judge(self, key: OffloadKey, found: bytes, versions: Iterable[int]) -> None:
        """Find out which version was loaded.

        Raises:
            Breach: none of them, whole.
        """
        if not any(found == self.content(key, version) for version in versions):
            raise Breach(f"a load succeeded, but {self._strange(found, key, versions)}")

    async def bounded(self, awaitable: Awaitable[T], operation: str) -> T:
        """Wait for a call of the tier, but not for ever.

        Raises:
            Breach: it did not end, or raised what is no error of a tier.
        """
        task = asyncio.ensure_future(awaitable)
        if not await self.ends(task):
            task.cancel()
            raise Breach(f"{operation} had not ended after {self.subject.patience_s:g} s")
        try:
            return task.result()
        except TierError:
            raise
        except ConfigError as error:
            if operation == "open":
                raise
            raise Breach(f"{operation} raised a ConfigError, which is for open: {error}") from error
        except asyncio.CancelledError as error:
            raise Breach(f"{operation} raised CancelledError without being cancelled") from error
        except Exception as error:
            raise Breach(
                f"{operation} raised {type(error).__name__}: {error}, which is no TierError"
            ) from error

    async def ends(self, task: asyncio.Future[Any]) -> bool:
        """Wait for a task; whether it ended within the author's patience."""
        try:
            await asyncio.wait([task], timeout=self.subject.patience_s)
        except asyncio.CancelledError:
            task.cancel()
            await wait_out([task])
            raise
        return task.done()

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a call of the tier in a task of its own."""
        return self.subject.clock.spawn(coroutine, name=name)

    async def _move(self, operation: str, batch: Sequence[LentBuffers]) -> list[TierError | None]:
        method = getattr(self.tier, operation)
        try:
            verdicts = await self.bounded(method([lent.transfer for lent in batch]), operation)
        except TierError as error:
            return [error] * len(batch)
        self._count(verdicts, len(batch), operation)
        for verdict in verdicts:
            if verdict is not None and not isinstance(verdict, TierError):
                raise Breach(
                    f"{operation} returned a {type(verdict).__name__} where None or a TierError "
                    "belongs"
                )
        return list(verdicts)

    def _count(self, results: Any, count: int, operation: str) -> None:
        try:
            given = f"{len(results)} results"
        except TypeError:
            given = f"a {type(results).__name__}"
        if given != f"{count} results":
            raise Breach(f"{operation} returned {given} for a batch of {count}")

    def _strange(self, found: bytes, key: OffloadKey, versions: Iterable[int]) -> str:
        """In words, what something is that should be a version of a chunk."""
        wholes = [self.content(key, version) for version in versions]
        matches = [sum(map(bytes.__eq__, pieces_of(found), pieces_of(whole))) for whole in wholes]
        if sum(map(bool, matches)) > 1:
            return "it is a mixture of several that were stored under the key"
        if any(matches):
            return "only a part of it is what was stored under the key"
        return "it holds something else than was stored under the key"


def is_miss(error: TierError) -> bool:
    """Whether an error says that the chunk is not there, or not whole."""
    return isinstance(error, ChunkNotFoundError | CorruptChunkError)


def told(error: TierError | None) -> str:
    """An error in words."""
    return "success" if error is None else f"{type(error).__name__}: {error}"


def pieces_of(content: bytes) -> list[bytes]:
    """Content in pieces small enough that each tells where it comes from."""
    return [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
