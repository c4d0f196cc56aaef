"""The small file that the processes of one root share: its lock, counters and promises.

It is read and written with ``pread`` and ``pwrite`` under the lock, not mapped: on a network file
system the lock makes these coherent between machines, and a mapping not.
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
# Magic, whether settled, checksum of all that follows, generation, four lengths, number of leases.
_HEADER = struct.Struct("<8s?xxxIQQQQQI")
_SETTLED_AT = 8
_CHECKED_FROM = 16
_LEASE = struct.Struct("<8s16sQ")
_PAGE_BYTES = 4096
_MOST_BYTES = 2**20


class Promise(NamedTuple):
    """What a lease stands for.

    Attributes:
        fingerprint: the namespace that its process has open.
        reserved_bytes: room promised to its writes under way.
    """

    fingerprint: str
    reserved_bytes: int


@dataclass
class Control:
    """What is in the control file.

    Attributes:
        settled: whether the counters agree with the disk. They do not while somebody renames or
            unlinks, nor ever after if he is killed at it: then the next counts anew.
        generation: of the ledger's content; a random number.
        ledger_bytes: how much of the ledger's file is valid.
        rewritten_bytes: how long the ledger was when it was begun anew.
        used_bytes: of all stored chunks.
        chunks: number of them.
        promises: by lease.
    """

    settled: bool = False
    generation: int = 0
    ledger_bytes: int = 0
    rewritten_bytes: int = 0
    used_bytes: int = 0
    chunks: int = 0
    promises: dict[str, Promise] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        """What all processes together have been promised."""
        return sum(promise.reserved_bytes for promise in self.promises.values())


class ControlFile:
    """The file, which must be open for as long as this object is used.

    Args:
        fd: of the file, not shared with another user of the lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._content = b""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes, and other tiers of this one, out for as long as the block lasts."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> Control:
        """What the file says; an unsettled nothing where it is new, torn or foreign."""
        self._content = os.pread(self._fd, _PAGE_BYTES, 0)
        if len(self._content) == _PAGE_BYTES and any(self._content[-_LEASE.size :]):
            # More leases than are usual.
            self._content += os.pread(self._fd, _MOST_BYTES, _PAGE_BYTES)
        return _decode(self._content) or Control()

    def unsettle(self) -> None:
        """Mark what the file says as not to be relied on, until the next :meth:`write`."""
        os.pwrite(self._fd, b"\0", _SETTLED_AT)
        self._content = b""

    def write(self, control: Control) -> None:
        """Replace what the file says."""
        content = _encode(control)
        if content != self._content:
            os.pwrite(self._fd, content, 0)
            self._content = content


def _encode(control: Control) -> bytes:
    rows = [
        _LEASE.pack(bytes.fromhex(lease), bytes.fromhex(fingerprint), reserved_bytes)
        for lease, (fingerprint, reserved_bytes) in control.promises.items()
    ]
    content = bytearray(
        _HEADER.pack(
            _MAGIC,
            control.settled,
            0,
            control.generation,
            control.ledger_bytes,
            control.rewritten_bytes,
            control.used_bytes,
            control.chunks,
            len(rows),
        )
    )
    content += b"".join(rows)
    checksum = zlib.crc32(memoryview(content)[_CHECKED_FROM:])
    content[_CHECKED_FROM - 4 : _CHECKED_FROM] = checksum.to_bytes(4, "little")
    # A whole page, so that later writes need no room on a full file system.
    return bytes(content).ljust(_PAGE_BYTES, b"\0")


def _decode(content: bytes) -> Control | None:
    if len(content) < _PAGE_BYTES:
        return None
    magic, settled, checksum, *counters, leases = _HEADER.unpack_from(content)
    end = _HEADER.size + leases * _LEASE.size
    if magic != _MAGIC or checksum != zlib.crc32(content[_CHECKED_FROM:end]):
        return None
    promises = {
        lease.hex(): Promise(fingerprint.hex(), reserved_bytes)
        for lease, fingerprint, reserved_bytes in _LEASE.iter_unpack(content[_HEADER.size : end])
    }
    generation, ledger_bytes, rewritten_bytes, used_bytes, chunks = counters
    return Control(settled, generation, ledger_bytes, rewritten_bytes, used_bytes, chunks, promises)
