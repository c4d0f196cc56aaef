"""A chunk's name under a root, a stored chunk with its size and last use, and what a use records.

A chunk's time of use is its file's time of modification. The last two digits of its nanoseconds
count the uses before it. So the count is where the time is: in every process that shares the root,
and after a restart. A file system that keeps coarser times counts none.

The time of its store is its file's time of access, which a use leaves as it is.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from kvtier_sdk import OffloadKey

#: Times of use are below this, which is in 2116.
MAX_USED_NS = 2**62
#: A time that is later than now by more than this is no time of use. The clocks of processes that
#: share a root differ by less.
MOST_AHEAD_NS = 10 * 10**9

#: The last digits of a time of store. One that a kernel has set, because somebody else has read the
#: file, ends in others.
_STORED_DIGITS = 271_800
_STORED_NS = 1_000_000

#: Times of use without a count are multiples of this.
USE_NS = 100
#: The most uses that are counted before the last.
MOST_EARLIER_USES = 15
#: Uses in the same second are one: a chunk that is loaded is also reported as used. It is not the
#: time between uses that counts: the start of many prompts would never have one.
SAME_USE_NS = 1_000_000_000


def earlier_uses(used_ns: int) -> int:
    """Return the uses that a time of use counts before itself; 0 if its digits are no count."""
    earlier = used_ns % USE_NS
    return earlier if earlier <= MOST_EARLIER_USES else 0


def next_use_ns(known_ns: int, used_ns: int) -> int:
    """Return the time of use to record after a known one."""
    earlier = earlier_uses(known_ns)
    if used_ns // SAME_USE_NS > known_ns // SAME_USE_NS:
        earlier = min(earlier + 1, MOST_EARLIER_USES)
    return max(used_ns // USE_NS, known_ns // USE_NS + 1) * USE_NS + earlier


def stored_time_ns(stored_ns: int) -> int:
    """Return the time of access that records a store, to the millisecond."""
    return stored_ns // _STORED_NS * _STORED_NS + _STORED_DIGITS


class Lifetime(NamedTuple):
    """The times that the times of a chunk are compared with, in nanoseconds since the epoch.

    Attributes:
        latest_ns: a later time is of the future.
        expired_ns: a chunk whose last use was before this has expired; 0 where none expires.
        aged_ns: a chunk that was stored before this has its maximum age; 0 where there is none.
    """

    latest_ns: int
    expired_ns: int = 0
    aged_ns: int = 0

    def used_ns(self, status: os.stat_result) -> int:
        """Return the last use of a file's chunk.

        It is 0, and has expired where chunks do, if it is of the future, or if the chunk has its
        maximum age or an unknown one.
        """
        used_ns, stored_ns = status.st_mtime_ns, status.st_atime_ns
        if not 0 <= used_ns <= self.latest_ns:
            return 0
        if self.aged_ns and not (
            self.aged_ns <= stored_ns <= self.latest_ns and stored_ns % _STORED_NS == _STORED_DIGITS
        ):
            return 0
        return used_ns


class ChunkId(NamedTuple):
    """The name of a chunk among all namespaces of a root.

    Attributes:
        fingerprint: of its namespace.
        key: of the chunk in that namespace.
    """

    fingerprint: str
    key: OffloadKey


class StoredChunk(NamedTuple):
    """A chunk on disk.

    Attributes:
        chunk_id: its name.
        size_bytes: length of its file.
        used_ns: the last known use, in nanoseconds since the epoch. Another process may have used
            the chunk since.
    """

    chunk_id: ChunkId
    size_bytes: int
    used_ns: int
