"""The interfaces of tiers that handle batches, and of tiers that handle single chunks."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import ChunkError, TierContractError, TierError, check_any_answered
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.options.tier import TierConfig
from kvtier_sdk.types import (
    Capability,
    Entry,
    Locality,
    Medium,
    OffloadKey,
    Region,
    RequestContext,
    Transfer,
    Usage,
)

#: The version of :class:`SecondaryTierManager` that this release supports.
CONTRACT_VERSION = 1

#: For each contract version, the kvtier-sdk releases that support it, as a specifier for pip.
CONTRACT_RELEASES: Mapping[int, str] = {1: ">=0.1,<0.2"}


class ReportRemoved(Protocol):
    """A function that reports removed chunks to the SDK; see :class:`TierContext`."""

    def __call__(
        self, keys: Iterable[OffloadKey], /, *, evicted: bool = False, expired: bool = False
    ) -> None: ...


class TierCounter:
    """A counter that :meth:`TierContext.counter` makes. Any thread may add to it.

    ::

        context.counter("resends").add()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0.0

    def add(self, amount: float = 1) -> None:
        """Add an ``amount`` of 0 or more."""
        with self._lock:
            self._value += float(amount)

    def take(self) -> float:
        """Return the sum added since the last call."""
        with self._lock:
            taken, self._value = self._value, 0.0
        return taken


class TierGauge:
    """A gauge that :meth:`TierContext.gauge` makes. Any thread may set it.

    ::

        context.gauge("segments").set(12)
    """

    def __init__(self) -> None:
        self._value = 0.0

    @property
    def value(self) -> float:
        """The last value set; 0 at first."""
        return self._value

    def set(self, value: float) -> None:
        """Set the gauge to ``value``."""
        self._value = float(value)


T = TypeVar("T", TierCounter, TierGauge)


class TierMetrics:
    def __init__(self) -> None:
        self._made: dict[str, TierCounter | TierGauge] = {}
        self._told: dict[str, float] = {}
        self._is_complete = False

    def find(self, name: str, kind: type[T]) -> T:
        if self._is_complete and name not in self._made:
            raise TierContractError(
                f"counter or gauge {name!r} comes too late: make it in __init__ or open"
            )
        found = self._made.setdefault(name, kind())
        if not isinstance(found, kind):
            raise TierContractError(f"{name!r} cannot be both a counter and a gauge")
        return found

    def complete(self) -> bool:
        """Refuse new names after this call; return true if a counter or gauge exists."""
        self._is_complete = True
        return bool(self._made)

    def take_changes(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return each counter's gain and each changed gauge's value since the last call."""
        made = self._made.items()
        gained = {name: one.take() for name, one in made if isinstance(one, TierCounter)}
        values = {name: one.value for name, one in made if isinstance(one, TierGauge)}
        counters = {n: gain for n, gain in gained.items() if gain or n not in self._told}
        gauges = {n: value for n, value in values.items() if value != self._told.get(n)}
        self._told.update(counters | gauges)
        return counters, gauges


@dataclass(frozen=True, slots=True)
class TierContext:
    """The environment of a tier: everything that the SDK provides besides the options.

    ::

        directory = Path(root, context.namespace.fingerprint)  # one directory per namespace
        context.logger.info("chunks of %s are in %s", context.name, directory)
        context.report_removed([key], evicted=True)  # the tier had to make room

    Attributes:
        name: the tier's name, unique in its manager.
        namespace: all facts that decide whether stored bytes can be reused; keep chunks of
            different ``namespace.fingerprint`` apart.
        chunk_bytes: length of a chunk, before rounding up to the tier's alignment.
        header_bytes: length of a transfer's header.
        payload_bytes: maximum length of a transfer's payload: ``chunk_bytes``, rounded up.
        clock: the source of time, sleeping and tasks; a tier uses no other clock.
        logger: this tier's own logger.
        report_removed: reports to the SDK that chunks are gone from the tier. Any thread may call
            this function, which never blocks. Pass ``evicted=True`` only if a full tier removed the
            chunks to make room, and ``expired=True`` only if the chunks were too old. Pass neither
            if the chunks were deleted or found damaged.
        regions: the memory of all transfers' buffers in this process: the slots, and the SDK's own
            buffers. The regions stay valid from before ``open`` until ``close`` has returned, so a
            client library (RDMA, GPUDirect) needs to register them only once.
        metrics: the counters and gauges that the tier has made; for the SDK only.
        maintenance: true if a tool opens the tier beside the engines that use it. The tier then
            changes nothing by itself: ``open`` makes no namespace and evicts nothing, and
            ``lookup`` and ``load`` record no use and remove nothing. The SDK does not call
            ``store``. ``delete`` works as usual.
        digest_bytes: maximum number of bytes, from the start of a payload, that a digest covers; 0
            if the SDK needs no digest. Only a tier that computes digests itself needs this number
            (:meth:`Transfer.seal`).
    """

    name: str
    namespace: Namespace
    chunk_bytes: int
    header_bytes: int
    payload_bytes: int
    clock: Clock
    logger: logging.Logger
    report_removed: ReportRemoved
    regions: tuple[Region, ...] = ()
    metrics: TierMetrics = field(default_factory=TierMetrics)
    maintenance: bool = False
    digest_bytes: int = 0

    @property
    def object_bytes(self) -> int:
        """Maximum length in bytes of a stored object: header and payload."""
        return self.header_bytes + self.payload_bytes

    def counter(self, name: str) -> TierCounter:
        """Make a counter for this tier, exported as ``kvtier_backend_counter_total``.

        Make counters in ``__init__`` or :meth:`SecondaryTierManager.open`; a second call with the
        same name returns the same counter. The SDK reads the counters once a second.

        Args:
            name: the counter's name in this tier, unit included: ``resends``, ``read_bytes``.

        Raises:
            TierContractError: a gauge has this name, or a new counter is made after ``open``.
        """
        return self.metrics.find(name, TierCounter)

    def gauge(self, name: str) -> TierGauge:
        """Make the gauge ``name``, exported as ``kvtier_backend_gauge``; see :meth:`counter`."""
        return self.metrics.find(name, TierGauge)


class SecondaryTierManager(ABC):
    """A tier that stores chunks behind the primary tier, and finds them again.

    The SDK makes an instance and calls :meth:`open` first and :meth:`close` last. In between it
    calls the other methods, several at once, all on one event loop. A tier never blocks that
    loop: use :func:`kvtier_sdk.run_blocking`. The SDK handles batching, deadlines, retries,
    integrity checks and accounting.

    Rules for every tier:

    - *Results have the order and the length of the batch.* ``None`` means done, and a returned
      :class:`TierError` means that this one chunk failed. A raised error fails the whole batch.
    - *A call names no key twice*, and at most :attr:`max_batch_keys` keys.
    - *Buffers belong to the SDK*, which lends them until the coroutine ends. A cancelled coroutine
      must not end before all access to the buffers has ended. A cancelled store may still take
      effect, even after a later deletion of the chunk.
    - *No reader ever sees a partly written object*, even if a store fails midway.
    - *Storing a key twice is harmless*: the tier keeps the first or the last complete object. If
      the last transfer's ``replace`` is true, the tier keeps the last object.
    - *An error of one object fails that object only*: the verdict for its key is a
      :class:`ChunkError`, and the batch goes on. ``lookup`` answers ``False`` for an object that it
      cannot examine, and raises the error only if it can examine none of the call's objects.
    - *An outage is a* :class:`TierUnavailableError`, never ``False`` from :meth:`lookup`.
    - *Raise only* :class:`TierError` and its subclasses (:func:`kvtier_sdk.map_exceptions`).
    - *A key may hold any bytes*; a chunk is found only under its own key in its own namespace.
    - *A tier is built from its options alone*, in the engine's process or in a separate one.
    - *Several instances may be open at once* on one store, in one process or in several. Closing
      one does not affect the others. Except on :attr:`Medium.CPU`, each instance finds all chunks.
    - *A wrong setting is a* :class:`ConfigError` *of* :meth:`open`, and wrong credentials are a
      :class:`TierAuthError`. Neither is retried. During an outage, the SDK retries the opening.
    - *A closed tier leaves nothing behind*: no task, thread, file descriptor or buffer.

    A complete tier that keeps its chunks in a dictionary::

        class DictionaryTier(SecondaryTierManager):
            contract_version = 1
            medium = Medium.CPU

            async def open(self):
                self._objects = {}

            async def lookup(self, keys, request):
                return [key in self._objects for key in keys]

            async def store(self, batch):
                for transfer in batch:
                    self._objects[transfer.key] = b"".join(transfer.buffers)
                return [None] * len(batch)

            async def load(self, batch):
                return [self._read(transfer) for transfer in batch]

            def _read(self, transfer):
                stored = self._objects.get(transfer.key)
                if stored is None:
                    return ChunkNotFoundError("no such chunk")
                transfer.fill(stored)
                return None

    Attributes:
        config_model: the class of this tier's options.
        medium: the medium on which chunks are kept.
        locality: the machine that holds the chunks: the engine's or another.
        capabilities: the optional methods that the tier implements.
        alignment: alignment of each buffer's address and length: a power of two, up to 4,096 bytes.
        needs_process: true for a tier that must run in a separate process, for example because
            its client can crash, or holds the interpreter lock for long.
        max_batch_keys: the maximum number of keys in a call of ``lookup``, ``load``, ``store``,
            ``touch`` or ``delete``; ``None`` for no limit. The SDK splits longer batches.
        fixed_length: true for a tier whose objects must all be ``context.object_bytes`` long. The
            tier gets no compressed chunks, and need not call :meth:`Transfer.received`.
        runner_defaults: the tier's own defaults for the options that every tier has, written as in
            a configuration. The operator's settings override them. Example for a store behind a
            slow link: ``{"lookup_deadline": "200ms", "concurrency": 4}``.
        contract_version: the :data:`CONTRACT_VERSION` that the tier was written for.
        config: the validated options.
        context: the tier's :class:`TierContext`: its name, namespace, clock, logger and more.
    """

    config_model: ClassVar[type[TierConfig]] = TierConfig
    medium: ClassVar[Medium] = Medium.STORAGE
    locality: ClassVar[Locality] = Locality.LOCAL
    capabilities: ClassVar[Capability] = Capability.NONE
    alignment: ClassVar[int] = 1
    needs_process: ClassVar[bool] = False
    max_batch_keys: ClassVar[int | None] = None
    fixed_length: ClassVar[bool] = False
    runner_defaults: ClassVar[Mapping[str, Any]] = {}
    contract_version: ClassVar[int]

    # Subclasses annotate ``config`` with their own model.
    config: Any
    context: TierContext

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        """Keep ``config``, an instance of :attr:`config_model`, and ``context``; do no I/O."""
        self.config = config
        self.context = context

    async def open(self) -> None:
        """Connect to the store, and check every setting that can be checked.

        The SDK calls this once per instance, and cancels the call after ``open_deadline``. If the
        store cannot be reached, the SDK closes the instance, and may open a new instance.

        Raises:
            ConfigError: a setting cannot work.
            TierError: the store cannot be reached or refuses the credentials.
        """
        return

    @abstractmethod
    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        """Return which chunks are stored, for the ``request`` that needs them.

        Returns:
            One boolean per key, in the order of ``keys``; 0, 1 and ``numpy.bool_`` are also valid.

        Raises:
            TierError: the lookup failed.
        """

    @abstractmethod
    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        """Store chunks: write each transfer's buffers, one after the other, as one object.

        Args:
            batch: the chunks to write; their buffers must not be modified. An older object may
                stay, unless ``transfer.replace`` is true.

        Returns:
            One verdict per transfer, in order: ``None`` if later calls of :meth:`load` find the
            chunk.

        Raises:
            TierError: the whole batch failed for one reason.
        """

    @abstractmethod
    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        """Load chunks: fill each transfer's buffers from its object.

        A missing object is a :class:`ChunkNotFoundError`. An object that does not fit into the
        buffers is a :class:`CorruptChunkError`; :meth:`Transfer.received` raises it. An object that
        cannot be read, while others can, is a :class:`ChunkError`. After a failed load, the content
        of the buffers is undefined.

        Returns:
            One verdict per transfer, in the order of ``batch``.

        Raises:
            TierError: the whole batch failed for one reason.
        """

    async def close(self) -> None:
        """Release everything in bounded time, even if :meth:`open` failed.

        Running calls end, with a result or an error. A second close does nothing.
        """
        return

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete chunks; ignore missing chunks. (:attr:`Capability.DELETE`)

        Raise a :class:`TierError` if some of ``keys`` could not be deleted.
        """
        raise TierContractError("capability DELETE is declared but delete() is not implemented")

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark chunks as just used; ignore unknown chunks. (:attr:`Capability.TOUCH`)

        Args:
            keys: chunks that were used in the primary tier, most recent last.
        """
        raise TierContractError("capability TOUCH is declared but touch() is not implemented")

    def scan(self) -> AsyncIterator[Entry]:
        """Iterate over the stored chunks of this namespace. (:attr:`Capability.SCAN`)

        Returns:
            Entries in any order. Chunks stored or removed during the iteration may be missed. The
            iteration raises a :class:`TierError` if the store cannot be read.
        """
        raise TierContractError("capability SCAN is declared but scan() is not implemented")

    async def usage(self) -> Usage:
        """Return how full the tier is. (:attr:`Capability.USAGE`)

        The SDK calls this method every 5 seconds, for ``kvtier_tier_used_bytes`` and to learn if
        the tier is full. So keep a count, or query a sum from the store; do not list the chunks.

        Returns:
            The usage of all namespaces that share the tier's capacity.
        """
        raise TierContractError("capability USAGE is declared but usage() is not implemented")

    def namespaces(self) -> AsyncIterator[StoredNamespace]:
        """Iterate over the namespaces in the tier. (:attr:`Capability.NAMESPACES`)

        Only tools call this method, on a tier opened with ``context.maintenance``. A tier with this
        capability obeys the rules of ``maintenance``.

        Returns:
            Every namespace in the same place that has a chunk or a manifest, also the tier's own.
            Each appears once, in any order. The iteration raises the same errors as :meth:`scan`.
        """
        raise TierContractError(
            "capability NAMESPACES is declared but namespaces() is not implemented"
        )


class ChunkTierManager(SecondaryTierManager):
    """A tier whose methods handle one chunk each, and raise an error if the chunk fails.

    The SDK calls a method once for each chunk of a batch, for up to :attr:`fan_out` chunks at once.
    All rules of :class:`SecondaryTierManager` apply. The backend authors' guide has an example.

    Attributes:
        fan_out: maximum number of chunks to handle at once. Set it per class or per instance.
    """

    fan_out: int = 8

    @abstractmethod
    async def contains_chunk(self, key: OffloadKey) -> bool:
        """Return true if :meth:`load_chunk` would find a chunk under ``key``.

        Raises:
            TierError: the check failed.
        """

    @abstractmethod
    async def store_chunk(self, transfer: Transfer) -> None:
        """Write the ``transfer``'s buffers, one after the other, as one object; do not modify them.

        Raises:
            TierError: the chunk was not stored.
        """

    @abstractmethod
    async def load_chunk(self, transfer: Transfer) -> None:
        """Fill the ``transfer``'s buffers from its object.

        Raises:
            ChunkNotFoundError: there is no such object.
            CorruptChunkError: the object's length is wrong; :meth:`Transfer.received` raises it.
            ChunkError: this object cannot be read, but others may be.
            TierError: the object cannot be read for another reason.
        """

    async def delete_chunk(self, key: OffloadKey) -> None:
        """Delete the chunk under ``key``; ignore a missing chunk. (:attr:`Capability.DELETE`)

        Raises:
            TierError: the chunk was not deleted.
        """
        await SecondaryTierManager.delete(self, [key])

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        calls = [partial(self.delete_chunk, key) for key in keys]
        await self.context.clock.gather_bounded(calls, limit=self.fan_out)

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        async def contains(key: OffloadKey) -> bool | ChunkError:
            try:
                return await self.contains_chunk(key)
            except ChunkError as fault:
                return fault

        found = await self.context.clock.gather_bounded(
            [partial(contains, key) for key in keys], limit=self.fan_out
        )
        check_any_answered(found)
        return [not isinstance(one, ChunkError) and one for one in found]

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
                return error.detached()
            return None

        return await self.context.clock.gather_bounded(
            [partial(verdict, transfer) for transfer in batch], limit=self.fan_out
        )
