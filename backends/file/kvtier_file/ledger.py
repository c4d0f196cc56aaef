"""The ledger: every store and removal under a root, in order.

Each process keeps the list of chunks in its own memory and reads only the new part of the ledger.
No process lists a directory to learn what another has done.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvtier_file.chunks import MAX_USED_NS, ChunkId, StoredChunk
from kvtier_sdk import OffloadKey

_READ_BYTES = 2**20
_PART_RECORDS = 2**12
# Fingerprint, length of the chunk's file or what became of it, time of use, length of the key.
_RECORD = struct.Struct("<16sqqB")
_REMOVED, _EVICTED = -1, -2


class LedgerDamagedError(Exception):
    """The file is shorter than the header says, or its records make no sense."""


class Change(NamedTuple):
    """A record of the ledger.

    Attributes:
        chunk_id: the chunk.
        stored: its new state; ``None`` after a removal.
        evicted: true after a removal that made room for others.
    """

    chunk_id: ChunkId
    stored: StoredChunk | None
    evicted: bool = False


class Ledger:
    """The ledger's file. Use it under the lock of the shared header, which holds its valid length.

    Args:
        fd: open for as long as this object is used.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, start: int, end: int) -> Iterator[Change]:
        """Iterate over the changes between two offsets.

        Raises:
            LedgerDamagedError: the file does not hold them.
        """
        # In parts: a header that others wrote may claim any length.
        content = b""
        while start < end:
            part = os.pread(self._fd, min(end - start, _READ_BYTES), start)
            if not part:
                raise LedgerDamagedError
            start += len(part)
            content += part
            at = 0
            while at + _RECORD.size <= len(content):
                fingerprint, size_bytes, used_ns, key_bytes = _RECORD.unpack_from(content, at)
                key_at = at + _RECORD.size
                if key_at + key_bytes > len(content):
                    break
                at = key_at + key_bytes
                yield _change(fingerprint.hex(), content[key_at:at], size_bytes, used_ns)
            content = content[at:]
        if content:
            raise LedgerDamagedError

    def append(self, changes: Iterable[Change], at: int) -> int:
        """Write changes at an offset.

        Returns:
            The new end.
        """
        records = map(_record, changes)
        while rest := memoryview(b"".join(itertools.islice(records, _PART_RECORDS))):
            while rest:
                written_bytes = os.pwrite(self._fd, rest, at)
                at += written_bytes
                rest = rest[written_bytes:]
        return at

    def compact(self, chunks: Iterable[StoredChunk]) -> int:
        """Replace the content with the chunks that are stored now.

        Returns:
            The new end.
        """
        # Overwrite first and truncate later: the old content's room is already ours.
        end = self.append((Change(stored.chunk_id, stored) for stored in chunks), 0)
        os.ftruncate(self._fd, end)
        return end


def _change(fingerprint: str, key: OffloadKey, size_bytes: int, used_ns: int) -> Change:
    chunk_id = ChunkId(fingerprint, key)
    if size_bytes in (_REMOVED, _EVICTED):
        return Change(chunk_id, None, size_bytes == _EVICTED)
    if not key or size_bytes < 0 or not 0 <= used_ns < MAX_USED_NS:
        raise LedgerDamagedError
    return Change(chunk_id, StoredChunk(chunk_id, size_bytes, used_ns))


def _record(change: Change) -> bytes:
    chunk_id, stored, evicted = change
    size_bytes, used_ns = _EVICTED if evicted else _REMOVED, 0
    if stored:
        size_bytes, used_ns = stored.size_bytes, stored.used_ns
    fingerprint = bytes.fromhex(chunk_id.fingerprint)
    return _RECORD.pack(fingerprint, size_bytes, used_ns, len(chunk_id.key)) + chunk_id.key
