"""Calls to a tier under test, each with a timeout and a check of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier_sdk.aio.clock import wait_out
from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import (
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    KVTierError,
    TierCapacityError,
    TierError,
)
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.runner.calls import NonsenseError, found_in, verdicts_in
from kvtier_sdk.runner.jobs import batches_of
from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.rules import Breach, NoRoom
from kvtier_sdk.types import Entry, OffloadKey, RequestContext, Transfer

if TYPE_CHECKING:
    from kvtier_sdk.testing.conformance.subject import TierSubject

S = TypeVar("S")
T = TypeVar("T")

REQUEST = RequestContext("conformance")
#: Content is compared in pieces of this length, each unique to its key, version and offset.
PIECE_BYTES = 16


def content_of(key: OffloadKey, version: int, size_bytes: int) -> bytes:
    """Return content in which each piece identifies the key, the version and the offset."""
    seed = len(key).to_bytes(4, "big") + key + version.to_bytes(4, "big")
    return hashlib.shake_128(seed).digest(size_bytes)


class Probe:
    """Calls one tier instance with a timeout. A malformed answer is a breach.

    As in the SDK, an error raised for a whole batch becomes each chunk's verdict. The probe retries
    lookups, stores and loads after a retryable error. Methods that return no verdicts raise errors.

    Args:
        subject: the tier under test.
        tier: the instance.
    """

    def __init__(self, subject: TierSubject, tier: SecondaryTierManager) -> None:
        self.subject = subject
        self.tier = tier
        self.object_bytes: int = tier.context.object_bytes
        self._closed = False

    async def open(self) -> None:
        """Open the tier."""
        await self.bounded(self.tier.open(), "open")

    async def close(self) -> None:
        """Close the tier."""
        self._closed = True
        await self.bounded(self.tier.close(), "close")

    async def clean_up(self) -> None:
        """Close the tier if it is open. Ignore errors, because other checks judge them."""
        if not self._closed:
            with contextlib.suppress(Breach, TierError):
                await self.close()

    async def lookup(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Call the tier's ``lookup``, and return one boolean for each of ``keys``."""
        answers = await self._answers(
            "lookup", keys, keys, lambda part: self.tier.lookup(part, REQUEST), found_in
        )
        for answer in answers:
            if isinstance(answer, TierError):
                raise answer
        return [answer is True for answer in answers]

    async def store(self, batch: Sequence[LentBuffers]) -> list[TierError | None]:
        """Store a ``batch`` of buffers from :meth:`full`, and return one verdict per chunk."""
        return await self._move("store", batch)

    async def load(self, batch: Sequence[LentBuffers]) -> list[TierError | None]:
        """Load chunks into a ``batch`` of :meth:`empty` buffers; return one verdict per chunk."""
        return await self._move("load", batch)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Call the tier's ``delete`` with ``keys``."""
        for part in self._calls(keys):
            await self.bounded(self.tier.delete([keys[index] for index in part]), "delete")

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Call the tier's ``touch`` with ``keys``, the most recent use last."""
        for part in self._calls(keys):
            await self.bounded(self.tier.touch([keys[index] for index in part]), "touch")

    async def scan(self) -> list[Entry]:
        """Call the tier's ``scan`` and return all entries."""
        return await self._listed(self.tier.scan, "scan")

    async def namespaces(self) -> list[StoredNamespace]:
        """Call the tier's ``namespaces`` and return all namespaces."""
        return await self._listed(self.tier.namespaces, "namespaces")

    def object_lengths(self) -> list[int]:
        """Return lengths of objects that the tier must support: short, medium and longest.

        If the tier's ``fixed_length`` is true, return only the longest.
        """
        context, unit = self.tier.context, self.tier.alignment
        if self.tier.fixed_length:
            return [self.object_bytes]
        payloads = (unit, round_up(context.payload_bytes // 2, unit), context.payload_bytes)
        return [context.header_bytes + payload_bytes for payload_bytes in payloads]

    def empty(
        self,
        key: OffloadKey,
        *,
        shift_bytes: int = 0,
        replace: bool = False,
        object_bytes: int | None = None,
    ) -> LentBuffers:
        """Create buffers for a load of the chunk ``key``; pass their ``transfer`` to the tier.

        Header and payload begin ``shift_bytes`` after the start of a page. Together they are
        ``object_bytes`` long, by default the full length. Set ``replace`` for a store that must
        replace the chunk.
        """
        return LentBuffers(
            self.subject.memory,
            key,
            REQUEST,
            self.tier.context,
            object_bytes=object_bytes or self.object_bytes,
            shift_bytes=shift_bytes,
            replace=replace,
        )

    def full(self, key: OffloadKey, version: int = 0, **lent_as: Any) -> LentBuffers:
        """Create buffers with a ``version`` of ``key``; pass ``lent_as`` to :meth:`empty`."""
        lent = self.empty(key, **lent_as)
        lent.fill(self.content(key, version, lent.transfer.object_bytes))
        return lent

    def content(self, key: OffloadKey, version: int = 0, object_bytes: int | None = None) -> bytes:
        """Return a ``version`` of the chunk ``key``, ``object_bytes`` long or at full length."""
        return content_of(key, version, object_bytes or self.object_bytes)

    async def put(
        self,
        keys: Iterable[OffloadKey],
        version: int = 0,
        *,
        object_lengths: Iterable[int] = (),
        replace: bool = False,
    ) -> list[OffloadKey]:
        """Store a ``version`` of the chunks ``keys``; return the keys that the tier accepted.

        The objects have ``object_lengths``, by default full length. ``replace`` is as in
        :meth:`empty`. A store that fails for any reason except lack of room is a breach, and so is
        lack of room in an empty tier.
        """
        batch = [
            self.full(key, version, object_bytes=length, replace=replace)
            for key, length in itertools.zip_longest(keys, object_lengths)
        ]
        verdicts = await self.store(batch)
        for verdict in verdicts:
            if verdict is not None and not isinstance(verdict, TierCapacityError):
                raise Breach(f"the store is in order, but storing gave {describe(verdict)}")
        kept = [lent.key for lent, verdict in zip(batch, verdicts, strict=True) if verdict is None]
        if batch and not kept and self.subject.keeps_chunks:
            raise Breach(f"an empty tier refused every store: {describe(verdicts[0])}")
        return kept

    async def put_one(self) -> OffloadKey:
        """Store a chunk under a new key, and return the key. If the tier is full, end the check."""
        (key,) = await self.put_all(1)
        return key

    async def put_all(self, count: int) -> list[OffloadKey]:
        """Store ``count`` new chunks, and return their keys. If the tier is full, end the check."""
        kept = await self.put(self.subject.new_keys(count))
        if len(kept) < count:
            raise NoRoom
        return kept

    async def get(self, key: OffloadKey, **lent_as: Any) -> bytes | TierError:
        """Load ``key``; return its content or the error. ``lent_as`` goes to :meth:`empty`."""
        lent = self.empty(key, **lent_as)
        (verdict,) = await self.load([lent])
        return lent.content if verdict is None else verdict

    async def expect(
        self,
        key: OffloadKey,
        *versions: int,
        may_miss: bool = False,
        what: str = "a stored chunk",
        **lent_as: Any,
    ) -> bool:
        """Load the chunk ``key``, require one of the ``versions``, and return true.

        If ``may_miss`` is true, the tier may also report the chunk absent or damaged; the result is
        then false. ``what`` describes the chunk in a breach. ``lent_as`` goes to :meth:`empty`.
        """
        found = await self.get(key, **lent_as)
        if isinstance(found, TierError):
            if may_miss and is_miss(found):
                return False
            raise Breach(f"loading {what} gave {describe(found)}")
        self.check_content(key, found, versions)
        return True

    def check_content(self, key: OffloadKey, found: bytes, versions: Iterable[int]) -> None:
        """Require that ``found`` is one of the ``versions`` of the chunk ``key``."""
        self.check_found(found, [self.content(key, version) for version in versions])

    @staticmethod
    def check_found(found: bytes, allowed: Sequence[bytes]) -> None:
        """Require that ``found`` is one of the ``allowed`` objects."""
        if found not in allowed:
            raise Breach(f"a load succeeded, but {_mismatch(found, allowed)}")

    async def bounded(self, awaitable: Awaitable[T], operation: str) -> T:
        """Wait for ``awaitable``, a call to the tier, with the subject's timeout.

        A call that does not end is a breach, and so is any error except a TierError. ``operation``
        is the call's name; only ``open`` may also raise a ConfigError.
        """
        task = asyncio.ensure_future(awaitable)
        if not await self.ends(task):
            task.cancel()
            raise Breach(f"{operation} had not ended after {self.subject.timeout_s:g} s")
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
                f"{operation} raised {type(error).__name__}: {error}, which is not a TierError"
            ) from error

    async def ends(self, task: asyncio.Future[Any]) -> bool:
        """Wait for ``task`` with the subject's timeout; return true if the task ended."""
        try:
            await asyncio.wait([task], timeout=self.subject.timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            await wait_out([task])
            raise
        return task.done()

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start ``coroutine``, a call to the tier, in a new task called ``name``."""
        return self.subject.clock.spawn(coroutine, name=name)

    async def _listed(self, iterate: Callable[[], AsyncIterator[T]], operation: str) -> list[T]:
        async def listed() -> list[T]:
            return [one async for one in iterate()]

        return await self.bounded(listed(), operation)

    async def _move(self, operation: str, batch: Sequence[LentBuffers]) -> list[TierError | None]:
        method: Callable[[Sequence[Transfer]], Awaitable[Any]] = getattr(self.tier, operation)
        keys = [lent.key for lent in batch]
        return await self._answers(
            operation, keys, batch, lambda part: method([one.transfer for one in part]), verdicts_in
        )

    async def _answers(
        self,
        operation: str,
        keys: Sequence[OffloadKey],
        items: Sequence[S],
        call: Callable[[list[S]], Awaitable[Any]],
        read: Callable[[Any, int], list[T]],
    ) -> list[T | TierError]:
        """Call the tier with ``items``, one for each of ``keys``; repeat after retryable errors."""
        options = self.subject.spec.runner
        answers: dict[int, T | TierError] = {}
        for tried in self._calls(keys):
            for attempt in range(options.retries + 1):
                found: Sequence[T | TierError]
                try:
                    answer = await self.bounded(call([items[at] for at in tried]), operation)
                    found = read(answer, len(tried))
                except TierError as error:
                    found = [error] * len(tried)
                except NonsenseError as nonsense:
                    raise Breach(f"{operation} returned {nonsense}") from None
                answers |= zip(tried, found, strict=True)
                tried = [
                    at
                    for at, one in zip(tried, found, strict=True)
                    if isinstance(one, TierError) and one.retryable
                ]
                if not tried or attempt == options.retries:
                    break
                await self.subject.clock.sleep(options.retry_delay_s * 2**attempt)
        return [answers[index] for index in range(len(keys))]

    def _calls(self, keys: Sequence[OffloadKey]) -> list[Sequence[int]]:
        """Split ``keys`` like the SDK, into batches of positions; no keys make one empty batch."""
        return batches_of(keys, self.tier.max_batch_keys or sys.maxsize) or [()]


def _mismatch(found: bytes, allowed: Iterable[bytes]) -> str:
    matches = [sum(map(bytes.__eq__, pieces_of(found), pieces_of(whole))) for whole in allowed]
    if sum(map(bool, matches)) > 1:
        return "the bytes are a mixture of several objects that were stored under the key"
    if any(matches):
        return "only a part of the bytes was stored under the key"
    return "the bytes were never stored under the key"


def is_miss(error: TierError) -> bool:
    return isinstance(error, ChunkNotFoundError | CorruptChunkError)


def describe(outcome: KVTierError | bytes | None) -> str:
    if isinstance(outcome, KVTierError):
        return f"{type(outcome).__name__}: {outcome}"
    return "success"


def pieces_of(content: bytes) -> list[bytes]:
    return [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]


async def start_and_cancel(
    probe: Probe, operation: str, lent: LentBuffers, turns: int = 1, delay_s: float = 0.0
) -> bool:
    """Cancel a call after ``turns`` loop cycles and ``delay_s``; return true if it then ends."""
    call = getattr(probe.tier, operation)([lent.transfer])
    task = probe.start(call, f"{operation} to be cancelled")
    for _ in range(turns):
        await asyncio.sleep(0)
    if delay_s:
        await probe.subject.clock.sleep(delay_s)
    task.cancel()
    ended = await probe.ends(task)
    if ended and not task.cancelled():
        # Retrieve the error, so that asyncio does not log it. Other checks judge the error.
        task.exception()
    return ended
