"""What authors implement: a tier, in its batched and in its small form, and an eviction policy."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierContractError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.tier import TierConfig
from kvtier_sdk.types import (
    Capability,
    Entry,
    Locality,
    Medium,
    OffloadKey,
    RequestContext,
    Transfer,
    Usage,
)

#: The version of :class:`SecondaryTierManager` that this release speaks.
CONTRACT_VERSION = 1

#: The releases of kvtier-sdk that speak each version of it, in pip's words.
CONTRACT_RELEASES: Mapping[int, str] = {1: ">=0.1,<0.2"}


@dataclass(frozen=True, slots=True)
class TierContext:
    """What the SDK gives a tier besides its options.

    Attributes:
        name: the tier's name, unique in its manager.
        namespace: all that decides whether stored bytes can be reused; keep chunks of different
            ``namespace.fingerprint`` apart.
        chunk_bytes: length of a chunk's payload, before rounding up to the tier's alignment.
        header_bytes: length of a transfer's header.
        payload_bytes: length of a transfer's payload view: ``chunk_bytes``, rounded up.
        clock: time, sleeping and tasks; a tier uses no other.
        logger: a logger of this tier's own.
        report_removed: tell the SDK that chunks are gone from the tier (evicted, expired,
            deleted, found damaged). Callable from any thread; never blocks.
    """

    name: str
    namespace: Namespace
    chunk_bytes: int
    header_bytes: int
    payload_bytes: int
    clock: Clock
    logger: logging.Logger
    report_removed: Callable[[Iterable[OffloadKey]], None]

    @property
    def object_bytes(self) -> int:
        """Length in bytes of every stored object: header and payload."""
        return self.header_bytes + self.payload_bytes


class SecondaryTierManager(ABC):
    """A tier behind the primary one: somewhere chunks can be stored and found again.

    The SDK makes one instance, calls :meth:`open`, then any of the other coroutines, several at
    once, all on one event loop, and last :meth:`close`. A tier never blocks that loop: use
    :func:`kvtier_sdk.run_blocking`. Batching, deadlines, retries, integrity and accounting are
    the SDK's.

    Rules for every tier:

    - *Results have the order and the length of the batch.* ``None`` means done, a
      :class:`TierError` says why that one chunk was not. An error that is raised instead counts
      for the whole batch.
    - *Buffers are the SDK's*, lent until the coroutine has returned. That holds after a
      cancellation too: let it through only when nothing touches the buffers any more.
    - *No reader ever sees a partly written object*, whatever fails in mid-store.
    - *Storing a key twice is harmless*; the last complete object or the first stays.
    - *An outage is a* :class:`TierUnavailableError`, never ``False`` from :meth:`lookup`.
    - Only :class:`TierError` and its subclasses are raised (:func:`kvtier_sdk.map_exceptions`).
    - *A key may hold any bytes*; a chunk is found under its own key in its own namespace, and
      nowhere else.
    - *A tier is built from its options alone*, in this process or in one of its own.
    - *A closed tier leaves nothing behind*: no task, thread, file descriptor or buffer.

    Attributes:
        config_model: the class of this tier's options.
        medium: what chunks are kept on.
        locality: whether that is this machine or another.
        capabilities: which of the optional coroutines are implemented.
        alignment: of each buffer's address and length, in bytes; a power of two up to 4,096.
        contract_version: the :data:`CONTRACT_VERSION` that the tier was written for.
        config: validated options.
        context: the tier's surroundings.
    """

    config_model: ClassVar[type[TierConfig]] = TierConfig
    medium: ClassVar[Medium] = Medium.STORAGE
    locality: ClassVar[Locality] = Locality.LOCAL
    capabilities: ClassVar[Capability] = Capability.NONE
    alignment: ClassVar[int] = 1
    contract_version: ClassVar[int]

    # A tier annotates 'config' with its own model where it wants the type.
    config: Any
    context: TierContext

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        """Keep the arguments. No I/O here: that is for :meth:`open`.

        Args:
            config: an instance of :attr:`config_model`.
            context: the tier's surroundings.
        """
        self.config = config
        self.context = context

    async def open(self) -> None:
        """Connect and check what can be checked.

        Raises:
            ConfigError: a setting cannot work.
            TierError: the store cannot be reached or refuses the credentials.
        """
        return

    @abstractmethod
    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        """Say which chunks are stored.

        Args:
            keys: chunks to look for.
            request: who asks.

        Returns:
            One truth value a key, in the order of ``keys``.

        Raises:
            TierError: the question could not be answered.
        """

    @abstractmethod
    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        """Keep chunks: write each transfer's buffers, one after the other, as one object.

        Args:
            batch: what to write; its buffers must not be changed.

        Returns:
            One verdict a transfer, in the order of ``batch``: ``None`` once a later
            :meth:`load` will find the chunk.

        Raises:
            TierError: all of them failed for one reason.
        """

    @abstractmethod
    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        """Bring chunks back: fill each transfer's buffers from its object.

        An object that is shorter or longer than the buffers is a :class:`CorruptChunkError`, one
        that is not there a :class:`ChunkNotFoundError`. What a failed load leaves in the buffers
        does not matter.

        Args:
            batch: what to read.

        Returns:
            One verdict a transfer, in the order of ``batch``.

        Raises:
            TierError: all of them failed for one reason.
        """

    async def close(self) -> None:
        """Let go of everything, in bounded time, also after :meth:`open` has failed.

        Calls that are under way end, with a result or an error. A second call does nothing.
        """
        return

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Forget chunks; those that are not there are no error. (:attr:`Capability.DELETE`)

        Args:
            keys: chunks to forget.

        Raises:
            TierError: some could not be deleted.
        """
        raise TierContractError("capability DELETE is announced but delete() is not implemented")

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count chunks as used just now; unknown ones are ignored. (:attr:`Capability.TOUCH`)

        Args:
            keys: chunks that were used above, the most important last.

        Raises:
            TierError: recency could not be noted.
        """
        raise TierContractError("capability TOUCH is announced but touch() is not implemented")

    def scan(self) -> AsyncIterator[Entry]:
        """Iterate over the stored chunks of this namespace. (:attr:`Capability.SCAN`)

        Returns:
            Entries in any order; chunks stored or removed meanwhile may be missed.

        Raises:
            TierError: while iterating, the store could not be read.
        """
        raise TierContractError("capability SCAN is announced but scan() is not implemented")

    async def usage(self) -> Usage:
        """Say how full the tier is. (:attr:`Capability.USAGE`)

        Returns:
            The tier's usage, of all namespaces that share its capacity.

        Raises:
            TierError: it could not be found out.
        """
        raise TierContractError("capability USAGE is announced but usage() is not implemented")


class ChunkTierManager(SecondaryTierManager):
    """The small face of the contract: one chunk at a time, failures raised.

    The SDK fans a batch out over the three coroutines, :attr:`fan_out` at once.

    Attributes:
        fan_out: how many chunks of one batch are under way at once; of the class, or of an
            instance whose options say so.
    """

    fan_out: int = 8

    @abstractmethod
    async def contains_chunk(self, key: OffloadKey) -> bool:
        """Say whether a chunk is stored.

        Args:
            key: the chunk.

        Returns:
            Whether :meth:`load_chunk` would find it.

        Raises:
            TierError: the question could not be answered.
        """

    @abstractmethod
    async def store_chunk(self, transfer: Transfer) -> None:
        """Write the transfer's buffers, one after the other, as one object.

        Args:
            transfer: what to write.

        Raises:
            TierError: it was not stored.
        """

    @abstractmethod
    async def load_chunk(self, transfer: Transfer) -> None:
        """Fill the transfer's buffers from its object.

        Args:
            transfer: what to read.

        Raises:
            ChunkNotFoundError: there is no such object.
            CorruptChunkError: the object has another length.
            TierError: it could not be read.
        """

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return await self.context.clock.gather_bounded(
            [lambda key=key: self.contains_chunk(key) for key in keys],  # type: ignore[misc]
            limit=self.fan_out,
        )

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await self._fan_out(self.store_chunk, batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await self._fan_out(self.load_chunk, batch)

    async def _fan_out(
        self, operation: Callable[[Transfer], Any], batch: Sequence[Transfer]
    ) -> list[TierError | None]:
        async def verdict(transfer: Transfer) -> TierError | None:
            try:
                await operation(transfer)
            except TierError as error:
                # Where it comes from leads to frames that hold the buffers.
                error.__cause__ = error.__context__ = None
                return error.with_traceback(None)
            return None

        return await self.context.clock.gather_bounded(
            [lambda transfer=transfer: verdict(transfer) for transfer in batch],  # type: ignore[misc]
            limit=self.fan_out,
        )
