"""The shared header: a small file with the lock, the counters and the reservations of a root.

The file is read and written with ``pread`` and ``pwrite`` under the lock. It is not mapped, because
on a network file system the lock does not make mappings coherent between machines.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

_MAGIC = b"kvtfile1"
# Magic, clean flag, checksum of all later bytes, generation, four counters, number of leases.
_HEADER = struct.Struct("<8s?xxxIQQQQQI")
_CLEAN_AT = 8
_CHECKED_FROM = 16
_LEASE = struct.Struct("<8s16sQ")
_PAGE_BYTES = 4096
_MAX_BYTES = 2**20


class Reservation(NamedTuple):
    """Bytes that a process has reserved for its writes in a namespace."""

    fingerprint: str
    reserved_bytes: int


@dataclass
class SharedHeader:
    # True if the counters agree with the disk. A change clears the flag first, in case of a crash.
    clean: bool = False
    generation: int = 0  # a random number, new with each compaction of the ledger
    ledger_bytes: int = 0  # valid length of the ledger
    compacted_bytes: int = 0  # length of the ledger after its last compaction
    used_bytes: int = 0
    chunks: int = 0
    reservations: dict[str, Reservation] = field(default_factory=dict)  # by lease

    @property
    def reserved_bytes(self) -> int:
        return sum(one.reserved_bytes for one in self.reservations.values())


class HeaderFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._content = b""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes and this process's other tiers during the ``with`` block."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> SharedHeader:
        """Return the header, or an empty unclean header if the file is new or damaged."""
        self._content = os.pread(self._fd, _PAGE_BYTES, 0)
        if len(self._content) == _PAGE_BYTES and any(self._content[-_LEASE.size :]):
            # The first page is full of reservations, so further pages may contain more.
            self._content += os.pread(self._fd, _MAX_BYTES, _PAGE_BYTES)
        return _decode(self._content) or SharedHeader()

    def mark_dirty(self) -> None:
        """Clear the file's clean flag until the next :meth:`write`."""
        os.pwrite(self._fd, b"\0", _CLEAN_AT)
        self._content = b""

    def write(self, header: SharedHeader) -> None:
        content = _encode(header)
        if content != self._content:
            os.pwrite(self._fd, content, 0)
            self._content = content


def _encode(header: SharedHeader) -> bytes:
    rows = [
        _LEASE.pack(bytes.fromhex(lease), bytes.fromhex(fingerprint), reserved_bytes)
        for lease, (fingerprint, reserved_bytes) in header.reservations.items()
    ]
    lengths = header.ledger_bytes, header.compacted_bytes, header.used_bytes, header.chunks
    content = bytearray(
        _HEADER.pack(_MAGIC, header.clean, 0, header.generation, *lengths, len(rows))
    )
    content += b"".join(rows)
    checksum = zlib.crc32(memoryview(content)[_CHECKED_FROM:])
    content[_CHECKED_FROM - 4 : _CHECKED_FROM] = checksum.to_bytes(4, "little")
    # Fill a whole page, so that later writes need no room on a full file system.
    return bytes(content).ljust(_PAGE_BYTES, b"\0")


def _decode(content: bytes) -> SharedHeader | None:
    if len(content) < _PAGE_BYTES:
        return None
    magic, clean, checksum, *counters, leases = _HEADER.unpack_from(content)
    end = _HEADER.size + leases * _LEASE.size
    if magic != _MAGIC or end > len(content) or checksum != zlib.crc32(content[_CHECKED_FROM:end]):
        return None
    reservations = {
        lease.hex(): Reservation(fingerprint.hex(), reserved_bytes)
        for lease, fingerprint, reserved_bytes in _LEASE.iter_unpack(content[_HEADER.size : end])
    }
    generation, ledger_bytes, compacted_bytes, used_bytes, chunks = counters
    return SharedHeader(
        clean, generation, ledger_bytes, compacted_bytes, used_bytes, chunks, reservations
    )
