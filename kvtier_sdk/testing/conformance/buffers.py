"""Memory to lend to a tier: of any length and address, between guard bytes, and taken back."""

from __future__ import annotations

import gc
import mmap

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.types import OffloadKey, RequestContext, Transfer

_GUARD_BYTES = 4096
_GUARD = b"\xa5" * _GUARD_BYTES


class LentBuffers:
    """Header and payload of one transfer in new memory, with guard bytes around each.

    Args:
        key: the chunk.
        request: the request of the transfer.
        header_bytes: length of the header.
        payload_bytes: length of the payload.
        shift_bytes: offset of each from the start of a page.
        replace: of the transfer.
    """

    def __init__(
        self,
        key: OffloadKey,
        request: RequestContext,
        *,
        header_bytes: int,
        payload_bytes: int,
        shift_bytes: int = 0,
        replace: bool = False,
    ) -> None:
        self.key = key
        self._header_at = _GUARD_BYTES + shift_bytes
        end = self._header_at + header_bytes
        self._payload_at = round_up(end + _GUARD_BYTES, mmap.PAGESIZE) + shift_bytes
        self._header_bytes, self._payload_bytes = header_bytes, payload_bytes
        size = self._payload_at + payload_bytes + _GUARD_BYTES
        self._memory = mmap.mmap(-1, size)
        self._memory[:] = (_GUARD * (size // _GUARD_BYTES + 1))[:size]
        view = memoryview(self._memory)
        self._transfer: Transfer | None = Transfer(
            key,
            request,
            view[self._header_at : end],
            view[self._payload_at : self._payload_at + payload_bytes],
            replace,
        )

    @property
    def transfer(self) -> Transfer:
        """The transfer that the tier gets."""
        assert self._transfer is not None, "taken back"
        return self._transfer

    def fill(self, content: bytes) -> None:
        """Write header and payload.

        Args:
            content: header and payload, one after the other.
        """
        self._memory[self._header_at : self._header_at + self._header_bytes] = content[
            : self._header_bytes
        ]
        self._memory[self._payload_at : self._payload_at + self._payload_bytes] = content[
            self._header_bytes :
        ]

    @property
    def content(self) -> bytes:
        """The bytes of header and payload now."""
        header = self._memory[self._header_at : self._header_at + self._header_bytes]
        return header + self._memory[self._payload_at : self._payload_at + self._payload_bytes]

    @property
    def is_overrun(self) -> bool:
        """True if anything was written outside header and payload."""
        memory, payload_end = self._memory, self._payload_at + self._payload_bytes
        guards = (
            memory[: self._header_at],
            memory[self._header_at + self._header_bytes : self._payload_at],
            memory[payload_end:],
        )
        return any(guard.strip(_GUARD[:1]) for guard in guards)

    def take_back(self) -> bool:
        """End the loan and return whether the memory is free: no view of it is left."""
        self._transfer = None
        try:
            self._memory.close()
        except BufferError:
            # A view in a reference cycle is not in use; only the collector frees it.
            gc.collect()
            try:
                self._memory.close()
            except BufferError:
                return False
        return True
