"""Names of chunks under a root, and the file times that record when chunks were stored and used.

The time of a chunk's last use is its file's modification time, in nanoseconds. The last two digits
of that time count the earlier uses. So every process that shares the root sees the count, and the
count survives a restart. A file system with coarser times keeps no count.

A file's access time records when its chunk was stored. A use does not change the access time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvtier_sdk import Clock, OffloadKey

#: Exclusive upper bound of times of use, in the year 2116.
MAX_USED_NS = 2**62
#: The maximum difference between two machines' clocks. A time further in the future is implausible.
MOST_AHEAD_NS = 10 * 10**9

#: These last six digits mark an access time as the time of a store. If a foreign program reads the
#: file, the kernel sets an access time with other digits.
_STORED_DIGITS = 271_800
_STORED_NS = 1_000_000

#: A recorded time of use is a multiple of this number, plus the count of earlier uses.
USE_NS = 100
MOST_EARLIER_USES = 15
#: Uses in the same second of the clock count once, because the SDK both loads and touches a chunk.
#: No pause between uses is required, because a chunk in constant use has none.
SAME_USE_NS = 1_000_000_000


def earlier_uses(used_ns: int) -> int:
    earlier = used_ns % USE_NS
    return earlier if earlier <= MOST_EARLIER_USES else 0


def next_use_ns(known_ns: int, used_ns: int) -> int:
    """Return the time that records a use; its last digits count the earlier uses.

    The time is later than ``known_ns``.
    """
    earlier = earlier_uses(known_ns)
    if used_ns // SAME_USE_NS > known_ns // SAME_USE_NS:
        earlier = min(earlier + 1, MOST_EARLIER_USES)
    return max(used_ns // USE_NS, known_ns // USE_NS + 1) * USE_NS + earlier


def stored_time_ns(stored_ns: int) -> int:
    return stored_ns // _STORED_NS * _STORED_NS + _STORED_DIGITS


class Lifetime(NamedTuple):
    """The limits of a chunk's recorded times, in nanoseconds since the epoch."""

    latest_ns: int  # the latest plausible time
    expired_ns: int = 0  # a chunk last used before this time has expired; 0 for no expiry
    aged_ns: int = 0  # a chunk stored before this time is too old; 0 for no maximum age

    def used_ns(self, status: os.stat_result) -> int:
        """Return the time of the last use; 0 if a time is implausible or the chunk is too old."""
        used_ns, stored_ns = status.st_mtime_ns, status.st_atime_ns
        if not 0 <= used_ns <= self.latest_ns:
            return 0
        if self.aged_ns and not (
            self.aged_ns <= stored_ns <= self.latest_ns and stored_ns % _STORED_NS == _STORED_DIGITS
        ):
            return 0
        return used_ns


class ChunkId(NamedTuple):
    fingerprint: str
    key: OffloadKey


class StoredChunk(NamedTuple):
    """A stored chunk, with a ``Change``'s fields. A process may have used it after ``used_ns``."""

    fingerprint: str
    key: OffloadKey
    size_bytes: int
    used_ns: int


class RecencyClock:
    """Gives times later than all known uses, even if the wall clock is set back a little.

    A known use far in the future is ignored. Otherwise later uses would get future times, and their
    chunks would never expire.
    """

    def __init__(self, clock: Clock, latest_ns: Callable[[], int]) -> None:
        self._clock = clock
        self._latest_ns = latest_ns
        self._lock = threading.Lock()
        self._next_ns = 0

    def take(self, count: int) -> range:
        """Return ascending times in nanoseconds since the epoch. The last two digits are zeros."""
        with self._lock:
            now_ns = int(self._clock.wall_s() * 1e9)
            known_ns = (now_ns, self._latest_ns() + 1, self._next_ns)
            start_ns = max(one for one in known_ns if one <= now_ns + MOST_AHEAD_NS)
            start_ns += -start_ns % USE_NS
            self._next_ns = start_ns + count * USE_NS
        return range(start_ns, start_ns + count * USE_NS, USE_NS)
