"""The ledger: what was stored and removed under a root, in order, so that each process can follow.

Each process keeps the chunks in its own memory and reads of the ledger only what is new to it: no
process lists a directory to learn what another has done.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvtier_file.budget import Chunk, Counted

# Fingerprint, length of the chunk's file or -1 if it is gone, time of use, length of the key.
_RECORD = struct.Struct("<16sqqB")
_GONE = -1


class LedgerLostError(Exception):
    """The file does not hold what it should."""


class Change(NamedTuple):
    """A line of the ledger.

    Attributes:
        chunk: which.
        counted: what is stored now, or ``None`` if it is gone.
    """

    chunk: Chunk
    counted: Counted | None


class Ledger:
    """The file, to be used under the lock of the control file, which says how much is valid.

    Args:
        fd: open for as long as this object is used.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, start: int, end: int) -> Iterator[Change]:
        """The changes between two offsets.

        Raises:
            LedgerLostError: they are not there.
        """
        content = _read(self._fd, start, end)
        at = 0
        while at < len(content):
            try:
                fingerprint, size_bytes, used_ns, key_bytes = _RECORD.unpack_from(content, at)
            except struct.error:
                raise LedgerLostError from None
            at += _RECORD.size
            chunk = Chunk(fingerprint.hex(), content[at : at + key_bytes])
            at += key_bytes
            gone = size_bytes == _GONE
            yield Change(chunk, None if gone else Counted(chunk, size_bytes, used_ns))

    def append(self, changes: Iterable[Change], at: int) -> int:
        """Write changes behind an offset.

        Returns:
            The new end.
        """
        content = b"".join(map(_record, changes))
        _write(self._fd, content, at)
        return at + len(content)

    def rewrite(self, stored: Iterable[Counted]) -> int:
        """Begin anew with what is stored now.

        Returns:
            The new end.
        """
        # Written before the rest is cut off: what lies there already takes no new room.
        end = self.append((Change(counted.chunk, counted) for counted in stored), 0)
        os.ftruncate(self._fd, end)
        return end


def _record(change: Change) -> bytes:
    chunk, counted = change
    size_bytes, used_ns = (counted.size_bytes, counted.used_ns) if counted else (_GONE, 0)
    fingerprint = bytes.fromhex(chunk.fingerprint)
    return _RECORD.pack(fingerprint, size_bytes, used_ns, len(chunk.key)) + chunk.key


def _read(fd: int, start: int, end: int) -> bytes:
    parts = []
    while start < end:
        part = os.pread(fd, end - start, start)
        if not part:
            raise LedgerLostError
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _write(fd: int, content: bytes, at: int) -> None:
    rest = memoryview(content)
    while rest:
        written_bytes = os.pwrite(fd, rest, at)
        at += written_bytes
        rest = rest[written_bytes:]
