"""The usage of a root by all processes that share it: stored chunks and reservations."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from kvtier_file.budget import Budget
from kvtier_file.chunks import ChunkId
from kvtier_file.errors import FULL
from kvtier_file.ledger import DELETED, EVICTED, EXPIRED, Change
from kvtier_file.root import Root
from kvtier_file.shared_files import SharedFiles
from kvtier_file.shared_header import Reservation, SharedHeader
from kvtier_file.usage_replica import UsageReplica
from kvtier_sdk import OffloadKey, TierCapacityError, TierContext


class SharedUsage:
    """The count of a root's chunks and reservations, shared by all processes of the root.

    Chunks are counted, renamed and unlinked only under the shared lock (:meth:`locked`). If a
    process is killed while it holds the lock, the header stays dirty, and the next process recounts
    the disk. A killed process also loses the lock of its lease. The next process that opens the
    root or is short of room removes the temporary files and reservations of the dead process.
    """

    def __init__(
        self, root: Root, lease: str, capacity_bytes: int | None, context: TierContext
    ) -> None:
        self._root = root
        self._lease = lease
        self._fingerprint = context.namespace.fingerprint
        self._report_removed = context.report_removed
        # This process's copy of the count. Without the lock, use only its ``in`` and ``latest_ns``.
        self.budget = Budget(capacity_bytes, root.last_used_ns)
        self._replica = UsageReplica(self.budget, self._fingerprint)
        self._reserved_bytes = 0
        self._opened: SharedFiles | None = None
        self.is_counted = False  # true once the chunks on disk have been counted
        self._thread_lock = threading.Lock()
        # The attributes below are valid only while the lock is held.
        self._header = SharedHeader()
        self._changes: list[Change] = []
        self._asked: set[str] = set()
        self._last_asked = ""

    def open(self) -> None:
        with self._thread_lock:
            self._join()

    def sweep(self) -> None:
        """Clean up after dead processes. If no other process uses the root, count the chunks."""
        with self.locked():
            self._reap_dead_leases(
                [one for one in self._other_leases() if not self._files.leases.is_held(one)]
            )

    def close(self) -> None:
        """Free this process's reservations and leave the root, if the shared files are open."""
        if self._opened is not None:
            with suppress(OSError), self._files.header.locked():
                header = self._files.header.read()
                header.reservations.pop(self._lease, None)
                self._files.header.write(header)
            self._leave()

    @contextmanager
    def locked(self, *, releasing_bytes: int = 0) -> Iterator[None]:
        """Hold the shared lock during the ``with`` block; first apply other processes' changes."""
        removed: dict[OffloadKey, int] = {}
        try:
            with self._thread_lock:
                self._reserved_bytes -= releasing_bytes
                self._join()
                try:
                    with self._files.header.locked():
                        self._begin()
                        succeeded = False
                        try:
                            yield
                            succeeded = True
                        finally:
                            self._end(succeeded)
                finally:
                    removed = self._replica.take_removed()
        finally:
            for reason in (DELETED, EXPIRED, EVICTED):
                if keys := [key for key, found in removed.items() if found == reason]:
                    self._report_removed(keys, evicted=reason == EVICTED, expired=reason == EXPIRED)

    # The caller of the methods below must hold the lock.

    @property
    def reserved_bytes(self) -> int:
        return self._header.reserved_bytes

    def mark_dirty(self) -> None:
        """Mark the header dirty before chunks are renamed or unlinked."""
        if self._header.clean:
            self._header.clean = False
            self._files.header.mark_dirty()

    def record(self, change: Change) -> None:
        """Apply a change to the count; :meth:`locked` later writes the change to the ledger."""
        self.mark_dirty()
        self._changes.append(change)
        self._replica.apply([change])

    def discard(self, chunk_id: ChunkId, reason: int = DELETED) -> None:
        """Stop counting a removed chunk, and record one of the ledger's reasons."""
        self.record((*chunk_id, reason, 0))

    def recount(self) -> None:
        self.mark_dirty()
        self._replica.replace(self._root.scan())

    def reserve(self, size_bytes: int) -> None:
        """Reserve bytes that have room now. ``locked(releasing_bytes=...)`` releases them later."""
        self._reserved_bytes += size_bytes
        self._enter_reservation()

    def victims(
        self, need_bytes: int, headroom_bytes: int | None, pinned: Callable[[], frozenset[ChunkId]]
    ) -> list[ChunkId]:
        reserved_bytes = self._header.reserved_bytes
        if self.budget.excess_bytes(need_bytes, reserved_bytes, headroom_bytes) <= 0:
            return []

        def choose() -> list[ChunkId]:
            return self.budget.victims(
                need_bytes,
                self._header.reserved_bytes,
                headroom_bytes,
                pinned=pinned(),
                open_namespaces={one.fingerprint for one in self._header.reservations.values()},
            )

        if not self._asked:
            self._reap(self._next_lease())
        try:
            return choose()
        except TierCapacityError:
            if not self._reap(self._other_leases()):
                raise
            return choose()

    def _enter_reservation(self) -> None:
        # Use this process's own count of reserved bytes: the header may have been replaced.
        reservation = Reservation(self._fingerprint, self._reserved_bytes)
        self._header.reservations[self._lease] = reservation

    def _other_leases(self) -> list[str]:
        """Return all other leases. Leases with reservations come first: they are probably held."""
        leases = dict.fromkeys([*self._header.reservations, *self._files.leases.names()])
        return [one for one in leases if one != self._lease]

    def _next_lease(self) -> list[str]:
        """Return at most one of the other leases, in turn, because checking all would be slow."""
        others = sorted(self._header.reservations.keys() - {self._lease})
        later = [one for one in others if one > self._last_asked]
        asked = (later or others)[:1]
        self._last_asked = "".join(asked)
        return asked

    def _reap(self, leases: Collection[str]) -> bool:
        """Clean up after the dead owners of leases; return true if any owner is dead."""
        dead = [one for one in set(leases) - self._asked if not self._files.leases.is_held(one)]
        self._asked.update(leases)
        if dead:
            with suppress(OSError):  # if the sweep fails, the files still need their reservations
                self._reap_dead_leases(dead)
        return bool(dead)

    def _reap_dead_leases(self, leases: Collection[str]) -> None:
        """Sweep the temporary files of dead processes, then drop their reservations and leases."""
        for directory in self._root.namespaces():
            directory.temporaries.sweep(self._files.leases.is_held)
        for lease in leases:
            self._header.reservations.pop(lease, None)
            self._files.leases.remove(lease)

    # --- joining and leaving the root, and running code under the lock ------------------------

    @property
    def _files(self) -> SharedFiles:
        if self._opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._opened

    def _join(self) -> None:
        """Open the shared files and acquire the lease, if they are not open or were removed."""
        # Do not join twice: a store before `open` may have joined and acquired the lease already.
        if self._opened is not None and not self._opened.are_lost():
            return
        self._leave()
        self._opened = files = SharedFiles(self._root.fd, self._root.directories)
        try:
            with files.header.locked():
                files.leases.acquire(self._lease)
                self._header = files.header.read()
                if not any(map(files.leases.is_held, self._other_leases())):
                    # While no process used the root, files may have changed without a record.
                    self._header.clean = False
                # Enter a reservation, because `_next_lease` returns only leases with a reservation.
                self._enter_reservation()
                files.header.write(self._header)
        except OSError:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._opened is not None:
            self._opened.leases.release(self._lease)
            self._opened.close()
            self._opened = None
            self._replica.detach()

    def _begin(self) -> None:
        self._header = self._files.header.read()
        self._asked = set()
        self.budget.know_time(self._root.lifetime().latest_ns)
        self._enter_reservation()
        if not self._replica.catch_up(self._header, self._files.ledger):
            self.recount()
        self.is_counted = True

    def _end(self, succeeded: bool) -> None:
        header = self._header
        header.used_bytes = self.budget.used_bytes
        header.chunks = len(self.budget)
        changes, self._changes = self._changes, []
        # After an unexpected error the count may lack changes on disk, so the header stays dirty.
        if succeeded and not header.clean:
            try:
                self._replica.publish(header, self._files.ledger, changes)
            except OSError as error:
                # Without room for the ledger the header stays dirty, so the next process recounts.
                if error.errno not in FULL:
                    raise
        self._files.header.write(header)
