"""What all processes that share a root have stored and promised: one account, one lock."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvtier_file.budget import Budget, Chunk, Counted
from kvtier_file.control import Control, Promise
from kvtier_file.failures import FULL
from kvtier_file.ledger import Change, LedgerLostError
from kvtier_file.shared_files import SharedFiles
from kvtier_sdk import OffloadKey

# A ledger shorter than this, or than twice what it was when it was begun, is not begun anew.
_SHORT_BYTES = 2**18


class Account:
    """Counts chunks and reservations for a root, together with the other processes there.

    All of it happens in a :meth:`section`, which holds the lock; what renames or unlinks chunks
    does so in the same section. Whoever is killed in a section leaves the account unsettled, and
    the next one counts anew what is on disk. Whoever is killed outside leaves a lease that
    nobody holds: its temporaries are swept and its reservations dropped when somebody opens the
    root or is short of room.

    Args:
        lease: the own one's name, from :func:`~kvtier_file.leases.new_lease`.
        fingerprint: the namespace that is open.
        capacity_bytes: of the root, or ``None``.
        root_fd: tells the root's descriptor; fails where the root is not open.
        count: lists what is on disk.
        sweep: removes, in one namespace, the temporaries of leases that are not held.
        report: told what is gone from the namespace, whoever removed it, without the lock.
    """

    def __init__(
        self,
        lease: str,
        fingerprint: str,
        capacity_bytes: int | None,
        *,
        root_fd: Callable[[], int],
        count: Callable[[], Iterable[Counted]],
        sweep: Callable[[str, Callable[[str], bool]], None],
        report: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        self._lease = lease
        self._fingerprint = fingerprint
        self._root_fd = root_fd
        self._count = count
        self._sweep = sweep
        self._report = report
        self._budget = Budget(capacity_bytes)
        self._reserved_bytes = 0
        self._opened: SharedFiles | None = None
        self._lock = threading.Lock()
        # Of the section that is open.
        self._control = Control()
        self._changes: list[Change] = []
        self._gone: dict[OffloadKey, None] = {}
        self._are_buried = False
        # How far the budget follows the ledger.
        self._generation: int | None = None
        self._followed_bytes = 0

    def open(self) -> None:
        """Join the processes that use the root; the first of them counts what is there.

        Raises:
            OSError: the files cannot be made or locked.
        """
        self._join()
        with self.section():
            pass

    def close(self) -> None:
        """Leave; what was reserved is free again. Nothing happens if it is not open."""
        if self._opened is not None:
            with suppress(OSError), self._files.control.locked():
                control = self._files.control.read()
                control.promises.pop(self._lease, None)
                self._files.control.write(control)
            self._leave()

    def is_held(self, lease: str) -> bool:
        """Whether a lease's process lives."""
        return self._files.leases.is_held(lease)

    def __contains__(self, chunk: Chunk) -> bool:
        """Whether a chunk was counted when last looked; needs no section."""
        return chunk in self._budget

    def latest_ns(self) -> int:
        """The latest time of use that was ever heard of; needs no section."""
        return self._budget.latest_ns

    @contextmanager
    def section(self, *, releasing_bytes: int = 0) -> Iterator[None]:
        """Hold the lock and know what all others have done.

        Args:
            releasing_bytes: reservations that end here, even if the section cannot be entered.

        Raises:
            OSError: the files cannot be locked, read or written.
        """
        gone: dict[OffloadKey, None] = {}
        try:
            with self._lock:
                self._reserved_bytes -= releasing_bytes
                if self._opened is None or self._opened.are_lost():
                    self._leave()
                    self._join()
                try:
                    with self._files.control.locked():
                        self._follow()
                        is_sound = False
                        try:
                            yield
                            is_sound = True
                        finally:
                            self._write_down(is_sound)
                finally:
                    gone, self._gone = self._gone, gone
        finally:
            if gone:
                self._report(list(gone))

    # In a section.

    @property
    def chunks(self) -> int:
        """How many are stored."""
        return len(self._budget)

    @property
    def used_bytes(self) -> int:
        """What they take."""
        return self._budget.used_bytes

    def changing(self) -> None:
        """Say that chunks are about to be renamed or unlinked; must come before that."""
        if self._control.settled:
            self._control.settled = False
            self._files.control.unsettle()

    def add(self, counted: Counted) -> None:
        """Count a chunk, which has its name now."""
        self._apply(Change(counted.chunk, counted))

    def forget(self, chunk: Chunk) -> None:
        """Stop counting a chunk, which is gone."""
        self._apply(Change(chunk, None))

    def touch(self, chunk: Chunk, used_ns: int) -> None:
        """Let a counted chunk go later, as far as this process has the choice."""
        self._budget.touch(chunk, used_ns)

    def reserve(self, size_bytes: int) -> None:
        """Promise bytes to a write; the victims for it are gone.

        They stay promised until a :meth:`section` releases them.
        """
        self._reserved_bytes += size_bytes
        self._promise()

    def victims(
        self,
        need_bytes: int,
        headroom_bytes: int | None,
        *,
        pinned: Callable[[], frozenset[Chunk]],
        last_used_ns: Callable[[Chunk], int | None],
    ) -> list[Chunk]:
        """Choose what must go before ``need_bytes`` may be reserved.

        Args:
            need_bytes: what is to be written.
            headroom_bytes: how much the file system can take, or ``None`` where that is no
                matter.
            pinned: tells which chunks must stay.
            last_used_ns: as for :meth:`Budget.victims`.

        Returns:
            As :meth:`Budget.victims`.

        Raises:
            TierCapacityError: there would not be room if all went.
        """
        excess_bytes = self._budget.excess_bytes
        if excess_bytes(need_bytes, self._control.reserved_bytes, headroom_bytes) <= 0:
            return []
        if not self._are_buried:
            self._bury_the_dead()
        return self._budget.victims(
            need_bytes,
            self._control.reserved_bytes,
            headroom_bytes,
            pinned=pinned(),
            in_use={promise.fingerprint for promise in self._control.promises.values()},
            last_used_ns=last_used_ns,
        )

    # Joining and leaving.

    @property
    def _files(self) -> SharedFiles:
        if self._opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._opened

    def _join(self) -> None:
        self._opened = files = SharedFiles(self._root_fd())
        try:
            with files.control.locked():
                files.leases.acquire(self._lease)
                self._control = files.control.read()
                self._bury_the_dead()
                if not any(map(files.leases.is_held, self._others())):
                    # Nobody saw to the account meanwhile: files may have come and gone.
                    self._control.settled = False
                files.control.write(self._control)
        except OSError:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._opened is not None:
            self._opened.leases.release(self._lease)
            self._opened.close()
            self._opened = None
            self._generation = None

    # Following the others, and letting them follow.

    def _follow(self) -> None:
        self._control = control = self._files.control.read()
        self._are_buried = False
        self._promise()
        if not control.settled:
            self._count_anew()
            return
        try:
            if control.generation == self._generation:
                changes = list(self._files.ledger.read(self._followed_bytes, control.ledger_bytes))
            else:
                changes = list(self._files.ledger.read(0, control.ledger_bytes))
                self._forget_all()
        except LedgerLostError:
            self._count_anew()
            return
        for change in changes:
            self._take(change)
        self._generation = control.generation
        self._followed_bytes = control.ledger_bytes
        if (self.chunks, self.used_bytes) != (control.chunks, control.used_bytes):
            self._count_anew()  # somebody else wrote to the files

    def _count_anew(self) -> None:
        self.changing()
        counted = list(self._count())
        self._forget_all()
        for one in counted:
            self._take(Change(one.chunk, one))
        # No other may take the ledger for one that it follows already.
        self._generation = None

    def _write_down(self, is_sound: bool) -> None:
        control = self._control
        control.used_bytes = self._budget.used_bytes
        control.chunks = len(self._budget)
        changes, self._changes = self._changes, []
        # After an error that nobody expected, what was renamed or unlinked is not known.
        if is_sound and not control.settled:
            try:
                self._extend_ledger(changes)
            except OSError as error:
                # Without room for it, the account stays unsettled: who comes next counts anew.
                if error.errno not in FULL:
                    raise
        self._files.control.write(control)

    def _extend_ledger(self, changes: Sequence[Change]) -> None:
        control = self._control
        long_bytes = max(_SHORT_BYTES, 2 * control.rewritten_bytes)
        if self._generation is None or control.ledger_bytes > long_bytes:
            control.ledger_bytes = control.rewritten_bytes = self._files.ledger.rewrite(
                self._budget
            )
            control.generation = int.from_bytes(os.urandom(8), "little")
        else:
            control.ledger_bytes = self._files.ledger.append(changes, control.ledger_bytes)
        self._generation = control.generation
        self._followed_bytes = control.ledger_bytes
        control.settled = True

    def _apply(self, change: Change) -> None:
        self.changing()
        self._changes.append(change)
        self._take(change)

    def _take(self, change: Change) -> None:
        chunk, counted = change
        ours = chunk.fingerprint == self._fingerprint
        if counted is not None:
            self._budget.add(counted)
            if ours:
                self._gone.pop(chunk.key, None)
        else:
            self._budget.forget(chunk)
            if ours:
                self._gone[chunk.key] = None

    def _forget_all(self) -> None:
        known = (counted.chunk for counted in self._budget)
        self._gone.update(
            (chunk.key, None) for chunk in known if chunk.fingerprint == self._fingerprint
        )
        self._budget.clear()

    def _promise(self) -> None:
        # From our own memory, so that a control file that was lost is complete again in time.
        self._control.promises[self._lease] = Promise(self._fingerprint, self._reserved_bytes)

    def _others(self) -> set[str]:
        return {*self._control.promises, *self._files.leases.names()} - {self._lease}

    def _bury_the_dead(self) -> None:
        """End the leases of processes that ended without doing so."""
        self._are_buried = True
        promises = self._control.promises
        for lease in self._others():
            if self._files.leases.is_held(lease):
                continue
            with suppress(OSError):  # while its files are there, so is its reservation
                if lease in promises:
                    self._sweep(promises[lease].fingerprint, self.is_held)
                    del promises[lease]
                self._files.leases.remove(lease)
