"""The ledger: every store and removal under a root, in order.

Each process keeps the list of chunks in memory, and reads only new changes. So no process has to
list directories to find the changes of other processes.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from kvtier_file.chunks import MAX_USED_NS
from kvtier_sdk import OffloadKey

#: The namespace's fingerprint, the chunk's key, the file's length (or a reason below), and the time
#: of the chunk's last use. Changes are plain tuples, so that a long ledger loads fast.
Change: TypeAlias = tuple[str, OffloadKey, int, int]
#: Values in place of a length: the chunk was deleted, was evicted to make room, or has expired.
DELETED, EVICTED, EXPIRED = -1, -2, -3

_READ_BYTES = 2**20
_PART_RECORDS = 2**12
# Fingerprint, file length, time of use, and length of the key. The key follows these fields.
_RECORD = struct.Struct("<16sqqB")


class LedgerDamagedError(Exception):
    """Raised if the ledger is shorter than the shared header states, or has invalid records."""


class Ledger:
    """The ledger's file. The lock and the ledger's valid length are in the shared header."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, start: int, end: int) -> Iterator[Change]:
        # Read in parts, because a header that another program wrote may claim any length.
        content = b""
        while start < end:
            part = os.pread(self._fd, min(end - start, _READ_BYTES), start)
            if not part:
                raise LedgerDamagedError
            start += len(part)
            content += part
            at = 0
            while (key_at := at + _RECORD.size) <= len(content):
                fingerprint, size_bytes, used_ns, key_bytes = _RECORD.unpack_from(content, at)
                if (end_at := key_at + key_bytes) > len(content):
                    break
                if not key_bytes or size_bytes < EXPIRED or not 0 <= used_ns < MAX_USED_NS:
                    raise LedgerDamagedError
                yield fingerprint.hex(), content[key_at:end_at], size_bytes, used_ns
                at = end_at
            content = content[at:]
        if content:
            raise LedgerDamagedError

    def append(self, changes: Iterable[Change], at: int) -> int:
        """Write changes at an offset; return the offset after them."""
        records = map(_record, changes)
        while rest := memoryview(b"".join(itertools.islice(records, _PART_RECORDS))):
            while rest:
                written_bytes = os.pwrite(self._fd, rest, at)
                at += written_bytes
                rest = rest[written_bytes:]
        return at

    def compact(self, chunks: Iterable[Change]) -> int:
        """Replace all records with one record for each stored chunk; return the new length."""
        # Overwrite first and truncate later, so that a full disk has room for the new content.
        end = self.append(chunks, 0)
        os.ftruncate(self._fd, end)
        return end


def _record(change: Change) -> bytes:
    fingerprint, key, size_bytes, used_ns = change
    return _RECORD.pack(bytes.fromhex(fingerprint), size_bytes, used_ns, len(key)) + key
