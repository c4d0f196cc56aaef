"""Buffers of any length and at any address, between guard bytes, to lend to a tier."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.contract import TierContext
from kvtier_sdk.types import OffloadKey, Region, RequestContext, Transfer

_GUARD_BYTES = 4096
#: A flag of mmap(2). Python's mmap module defines it only since version 3.13.
_MAP_NORESERVE = 0x4000
_GUARD = b"\xa5" * _GUARD_BYTES


class LentMemory:
    """The memory of all buffers, in a single mapping that a tier can register as a whole."""

    def __init__(self, size_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mapping = mmap.mmap(-1, size_bytes, flags=flags)
        self.region: Region = Region.of(self._mapping)
        self._used: dict[int, int] = {}  # the end of each reserved range of pages, by its start

    def _cut(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a view of reserved pages, which stay reserved until the last view is freed."""
        size_bytes = round_up(size_bytes, mmap.PAGESIZE)
        start = self._gap(size_bytes)
        if start + size_bytes > self.region.size_bytes:
            # Collect first, because earlier checks can leave views in reference cycles.
            gc.collect()
            start = self._gap(size_bytes)
        if start + size_bytes > self.region.size_bytes:
            raise MemoryError(f"the kit has no {size_bytes} bytes left to lend")
        self._used[start] = start + size_bytes
        part = np.frombuffer(self._mapping, np.uint8, size_bytes, start)
        weakref.finalize(part, self._used.pop, start)
        return part

    def _gap(self, size_bytes: int) -> int:
        start = 0
        # Sort a copy, because the garbage collector may run during the sort and remove items.
        for used, end in sorted(self._used.copy().items()):
            if used - start >= size_bytes:
                break
            start = end
        return start


class LentBuffers:
    """The header and the payload of one transfer, with guard bytes around each."""

    def __init__(
        self,
        memory: LentMemory,
        key: OffloadKey,
        request: RequestContext,
        context: TierContext,
        *,
        object_bytes: int,
        shift_bytes: int = 0,
        replace: bool = False,
    ) -> None:
        self.key = key
        header_at = _GUARD_BYTES + shift_bytes
        header_end = header_at + context.header_bytes
        payload_at = round_up(header_end + _GUARD_BYTES, mmap.PAGESIZE) + shift_bytes
        payload_end = payload_at + object_bytes - context.header_bytes
        size = payload_end + _GUARD_BYTES
        part = memory._cut(size)
        self._part = weakref.ref(part)
        view = part.data[:size]
        view[:] = (_GUARD * (size // _GUARD_BYTES + 1))[:size]
        self._guards = [view[:header_at], view[header_end:payload_at], view[payload_end:]]
        wrong_digests: list[bytes] = []
        self.wrong_digests: list[bytes] = wrong_digests

        # Do not refer to self here, because a cycle would keep the memory reserved.
        def compare(_: OffloadKey, __: memoryview, data: memoryview, digest: bytes | None) -> None:
            if digest is not None and digest != xxh3_128_digest(data[: context.digest_bytes]):
                wrong_digests.append(digest)

        self._transfer: Transfer | None = Transfer(
            key,
            request,
            view[header_at:header_end],
            view[payload_at:payload_end],
            replace=replace,
            unsealed=compare,
        )
        self._transfer.unverified = compare

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "taken back"
        return self._transfer

    def fill(self, content: bytes) -> None:
        header, payload = self.transfer.buffers
        header[:], payload[:] = content[: len(header)], content[len(header) :]

    @property
    def content(self) -> bytes:
        """The header, and the part of the payload that a load filled."""
        return b"".join((self.transfer.header, self.transfer.arrived))

    @property
    def is_overrun(self) -> bool:
        """True if any guard byte was overwritten."""
        return any(bytes(guard).strip(_GUARD[:1]) for guard in self._guards)

    def take_back(self) -> bool:
        """Drop all views of the memory; return true if the tier keeps none."""
        self._transfer = None
        self._guards.clear()
        if self._part() is not None:
            # Collect first, because an unused view can survive in a reference cycle.
            gc.collect()
        return self._part() is None
