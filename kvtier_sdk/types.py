"""The values that all layers share: keys, contexts, transfers and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from kvtier_sdk.errors import CorruptChunkError
from kvtier_sdk.hints import DEFAULT_PRIORITY, Hint

#: The name of a chunk: the chain hash of its tokens, then the index of its KV-cache group in four
#: bytes, big-endian. vLLM's keys have the same layout (``vllm/v1/kv_offload/base.py``).
OffloadKey: TypeAlias = bytes

#: A function that seals or checks a header. The last argument is the digest, if it is known.
_Finish: TypeAlias = Callable[[OffloadKey, memoryview, memoryview, bytes | None], None]

#: Length in bytes of the KV-cache group's index at the end of a key.
GROUP_BYTES: Final = 4


def make_offload_key(chain_hash: bytes, group_index: int = 0) -> OffloadKey:
    """Return a key: a ``chain_hash``, then a KV-cache group's ``group_index`` in four bytes.

    >>> key = make_offload_key(bytes(32), group_index=1)
    >>> split_offload_key(key) == (bytes(32), 1)
    True
    """
    return chain_hash + group_index.to_bytes(GROUP_BYTES, "big")


def split_offload_key(key: OffloadKey) -> tuple[bytes, int]:
    """Split a ``key`` into its chain hash and its KV-cache group index."""
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


class Medium(Enum):
    """The medium on which a tier keeps its chunks."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    """The machine that holds a tier's chunks: the engine's or another."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class Capability(Flag):
    """The optional methods of a tier, beyond ``lookup``, ``store`` and ``load``."""

    NONE = 0
    DELETE = auto()
    TOUCH = auto()
    SCAN = auto()
    USAGE = auto()
    NAMESPACES = auto()


class LookupResult(Enum):
    """The manager's answer to a lookup of one chunk."""

    #: The primary tier has the chunk, and ``prepare_load`` succeeds in the same step.
    HIT = auto()
    #: No tier has the chunk, or it cannot be loaded in time; recompute it.
    MISS = auto()
    #: The chunk will soon be readable in the primary tier; ask again next step.
    HIT_PENDING = auto()
    #: A tier has not answered yet, or a load will begin after this step; ask again next step.
    RETRY = auto()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request for which a key is looked up, loaded or stored.

    Attributes:
        request_id: the request's id, unique among the live requests.
        params: the client's parameters (vLLM's ``kv_transfer_params``), which tiers may read. A
            tier in a separate process gets no parameters if their JSON exceeds 16 KiB.
        resume_in_s: seconds from the request's end until the next turn of its conversation;
            infinite if the caller expects no further turn, and ``None`` if unknown.
        session: the request's conversation, if the caller names it. A tier in a separate process
            gets neither the session nor the fields below.
        tenant: the tenant whose budget the hints use; requests without a tenant share one budget.
        priority: the default priority of retained ranges, 0 to 100.
        hints: the caller's hints, which the manager carries out when the request ends.
        is_over: true if no later turn needs the chunks. Tiers then neither store nor renew them.
        trace_headers: the W3C headers ``traceparent`` and ``tracestate``, if the caller traces the
            request. Spans of the request's lookups, loads and stores join that trace.
    """

    request_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    resume_in_s: float | None = None
    session: str | None = None
    tenant: str = ""
    priority: int = DEFAULT_PRIORITY
    hints: tuple[Hint, ...] = ()
    is_over: bool = False
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    #: ``params`` as JSON, encoded once for all jobs of the request.
    _params_json: bytes | None = field(default=None, init=False, repr=False, compare=False)


class Region(NamedTuple):
    """A range of this process's memory, for client libraries that need addresses, not buffers.

    ::

        pinned_bytes = sum(region.size_bytes for region in context.regions)
        header, payload = transfer.regions
        assert any(region.covers(payload) for region in context.regions)

    Attributes:
        address: the address of the first byte.
        size_bytes: the length of the range.
    """

    address: int
    size_bytes: int

    @classmethod
    def of(cls, buffer: Any) -> Region:
        """Return the region of a contiguous ``buffer``, which may be read-only."""
        array = np.frombuffer(buffer, np.uint8)
        return cls(array.ctypes.data, array.nbytes)

    def covers(self, other: Region) -> bool:
        """Return true if all of the ``other`` region lies inside this one."""
        end = self.address + self.size_bytes
        return self.address <= other.address and other.address + other.size_bytes <= end


class Transfer:
    """The transfer of one chunk between its slot in the host pool and a tier.

    A backend writes ``header`` and ``payload`` one after the other as one object. A load reads the
    object into both buffers::

        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwritev(fd, transfer.buffers, 0)  # store
        os.preadv(fd, transfer.buffers, 0)  # load
        os.close(fd)

    An object may be shorter than the buffers of a load, because the SDK may compress chunks. So a
    tier whose :attr:`SecondaryTierManager.fixed_length` is false reports the object's length: it
    fills the buffers and calls :meth:`received`, or passes the whole object to :meth:`fill`.

    The SDK owns ``header`` and ``payload``, and lends them until ``store`` or ``load`` has ended.

    The digest is cheapest to compute in the thread that moves the bytes. For a store, the thread
    that first uses :attr:`header` or :attr:`buffers` computes the digest. After a load, the SDK
    computes the digest on the event loop, unless a thread of the tier has called :meth:`verify`.

    Attributes:
        key: the name of the chunk.
        request: the request that caused the transfer.
        payload: a contiguous view of the chunk's bytes, of format ``B``. Its length is a multiple
            of the tier's ``alignment``: ``context.payload_bytes`` for a load, and at most this for
            a store.
        arrived: the part of ``payload`` that a loaded object fills; for a store, the whole payload.
        replace: for a store, true if the last load of the chunk failed. The tier's object may then
            be damaged, so overwrite it without checking for its existence.
        unsealed: the function behind :meth:`seal`, or ``None`` once sealed; for the SDK only.
        unverified: the function behind :meth:`verify`, or ``None``; for the SDK only.
    """

    __slots__ = (
        *("_header", "arrived", "key", "payload", "replace", "request"),
        *("unsealed", "unverified"),
    )

    def __init__(
        self,
        key: OffloadKey,
        request: RequestContext,
        header: memoryview,
        payload: memoryview,
        *,
        replace: bool = False,
        unsealed: _Finish | None = None,
    ) -> None:
        self.key: OffloadKey = key
        self.request: RequestContext = request
        self.payload: memoryview = payload
        self.arrived: memoryview = payload
        self.replace: bool = replace
        self.unsealed: _Finish | None = unsealed
        self.unverified: _Finish | None = None
        self._header = header

    @property
    def header(self) -> memoryview:
        """The integrity header, which only the SDK interprets.

        Its address and length fit the tier's ``alignment``. The first access writes it for a store.
        """
        self.seal()
        return self._header

    def seal(self, digest: bytes | None = None) -> None:
        """Write a store's header once. Any thread of a tier may call this, to supply a digest.

        Args:
            digest: the xxh3-128 of the payload's first ``context.digest_bytes`` bytes, as 16 bytes
                in canonical order; ``None`` to let this method compute the digest.
        """
        if self.unsealed is not None:
            self.unsealed(self.key, self._header, self.payload, digest)
            self.unsealed = None

    def received(self, object_bytes: int) -> None:
        """Report the length of a loaded object, once the object is in the buffers.

        Args:
            object_bytes: length of the object, header included.

        Raises:
            CorruptChunkError: the object has no payload, or is longer than the buffers.
        """
        payload_bytes = object_bytes - len(self._header)
        if not 0 < payload_bytes <= len(self.payload):
            raise CorruptChunkError(
                f"{object_bytes} bytes stored; expected {len(self._header)} to {self.object_bytes}"
            )
        self.arrived = self.payload[:payload_bytes]

    def verify(self, digest: bytes | None = None) -> None:
        """Check a loaded chunk in this thread instead of on the event loop.

        Args:
            digest: as for :meth:`seal`, computed from the bytes as they are in the payload now.

        Raises:
            CorruptChunkError: the bytes are damaged or another chunk's; return this as the verdict.
        """
        if self.unverified is not None:
            self.unverified(self.key, self._header, self.arrived, digest)
            self.unverified = None

    def fill(self, stored: bytes | memoryview) -> None:
        """Fill a load's buffers from the whole object ``stored``. Errors: see :meth:`received`."""
        self.received(len(stored))
        split = len(self._header)
        self._header[:], self.arrived[:] = stored[:split], stored[split:]

    def with_payload(self, payload: memoryview) -> Transfer:
        """Return a copy with another ``payload``, for a tier that wraps another tier.

        The copy shares the header, which this call seals. On the copy, :meth:`verify` does nothing.
        """
        return Transfer(self.key, self.request, self.header, payload, replace=self.replace)

    def compressed(self, payload: memoryview) -> Transfer:
        """Return a copy of this store with a shorter ``payload``; for the SDK only."""
        unsealed = self.unsealed
        return Transfer(
            self.key, self.request, self._header, payload, replace=self.replace, unsealed=unsealed
        )

    @property
    def buffers(self) -> tuple[memoryview, memoryview]:
        """Header and payload, in the order in which a backend stores them."""
        return self.header, self.payload

    @property
    def regions(self) -> tuple[Region, Region]:
        """The addresses and lengths of :attr:`buffers`, each inside one of ``context.regions``."""
        return Region.of(self.header), Region.of(self.payload)

    @property
    def object_bytes(self) -> int:
        """Length in bytes of the stored object: header and payload together."""
        return len(self._header) + len(self.payload)


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk, as ``scan`` lists it.

    Attributes:
        key: the name of the chunk.
        object_bytes: length of the stored object, header included.
        used_s: the time of the chunk's last use, in seconds since the epoch. A tier that records no
            uses reports the time of storing, or ``None`` if it does not know that time.
    """

    key: OffloadKey
    object_bytes: int
    used_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The fill level of a tier.

    Attributes:
        chunks: number of stored chunks; ``None`` if the store does not count them.
        used_bytes: bytes that the chunks use, headers included.
        capacity_bytes: the tier's limit; ``None`` for an unlimited tier.
        free_bytes: the free bytes of the tier's disk, which other programs may share; ``None`` if
            the tier uses no disk or the number is unknown.
    """

    chunks: int | None
    used_bytes: int
    capacity_bytes: int | None
    free_bytes: int | None = None
