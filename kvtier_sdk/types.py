"""Values that every layer shares: keys, contexts, transfers, verdicts. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, TypeAlias

#: A chunk's name: the chain hash of its tokens, then the index of its KV-cache group in four
#: bytes, big-endian. The layout is vLLM's (``vllm/v1/kv_offload/base.py``), so that keys pass
#: through unchanged.
OffloadKey: TypeAlias = bytes

_GROUP_BYTES = 4


def make_offload_key(chain_hash: bytes, group_index: int = 0) -> OffloadKey:
    """Join a chain hash and a KV-cache group index into a key.

    Args:
        chain_hash: hash of the chunk's tokens and of all tokens before them.
        group_index: index of the KV-cache group, from 0.

    Returns:
        ``chain_hash`` followed by ``group_index`` in four bytes, big-endian.

    Raises:
        OverflowError: ``group_index`` is negative or does not fit four bytes.
    """
    return chain_hash + group_index.to_bytes(_GROUP_BYTES, "big")


def split_offload_key(key: OffloadKey) -> tuple[bytes, int]:
    """Take a key apart.

    Args:
        key: a key made by :func:`make_offload_key`.

    Returns:
        The chain hash and the KV-cache group index.
    """
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class Medium(Enum):
    """What a tier keeps its chunks on."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    """Where a tier's chunks are, seen from this engine."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class Capability(Flag):
    """What a tier can do beyond ``lookup``, ``store`` and ``load``."""

    NONE = 0
    DELETE = auto()
    TOUCH = auto()
    SCAN = auto()
    USAGE = auto()


class LookupResult(Enum):
    """The manager's answer to "is this chunk there?"."""

    #: In the primary tier and readable; ``prepare_load`` of it in the same step succeeds.
    HIT = auto()
    #: In no tier, or it cannot be had in time: recompute.
    MISS = auto()
    #: On its way into the primary tier; ask again next step.
    HIT_PENDING = auto()
    #: A tier is still answering; ask again next step.
    RETRY = auto()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request on whose behalf a key is looked up, loaded or stored.

    Attributes:
        request_id: unique among the requests that are alive.
        params: what the client sent along (vLLM's ``kv_transfer_params``); tiers may read it.
    """

    request_id: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk on its way between its slot and a tier.

    A backend writes ``header`` and ``payload`` one after the other as one object, and reads them
    back in place. Both views belong to the SDK: they may be used until the ``store`` or ``load``
    call that got them has returned, or, if it was cancelled, has ended.

    Attributes:
        key: the chunk's name.
        request: the request that caused the transfer.
        header: integrity header; read-only meaning to the SDK, opaque bytes to a backend. Its
            address and length are multiples of the tier's ``alignment``.
        payload: the slot itself, ``context.chunk_bytes`` long, rounded up to the tier's
            ``alignment``. Contiguous, format ``B``.
    """

    key: OffloadKey
    request: RequestContext
    header: memoryview
    payload: memoryview

    @property
    def buffers(self) -> tuple[memoryview, memoryview]:
        """Header and payload, in the order in which they are stored."""
        return self.header, self.payload

    @property
    def object_bytes(self) -> int:
        """Length in bytes of the stored object: header and payload together."""
        return len(self.header) + len(self.payload)


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk, as ``scan`` finds it.

    Attributes:
        key: the chunk's name.
        object_bytes: length of the stored object, header included.
    """

    key: OffloadKey
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is.

    Attributes:
        chunks: stored chunks.
        used_bytes: bytes that they take, headers included.
        capacity_bytes: the tier's limit, or ``None`` where it has none.
    """

    chunks: int
    used_bytes: int
    capacity_bytes: int | None
