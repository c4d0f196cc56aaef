"""The host pool: the memory of the primary tier, cut into slots."""

from __future__ import annotations

import gc
import logging
import mmap
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import memory
from kvtier_sdk.pool.layout import PoolLayout
from kvtier_sdk.pool.pool_file import PoolFile, join_named, new_unnamed, open_handle

_SHARED_MEMORY = Path("/dev/shm")

_log = logging.getLogger("kvtier.pool")


class HostPool:
    """Slots in one mapping, faulted in at once: of this process, or shared by several.

    ``HostPool(slots, chunk_bytes)`` is for one process. :meth:`join` is for the scheduler and the
    workers of a replica, which know one configuration and otherwise nothing of each other;
    :meth:`create` and :meth:`attach` are for a process and its children.

    Attributes:
        layout: where what lies; the next three are taken from it.
        slots: how many there are.
        chunk_bytes: payload of a slot.
        row_bytes: distance between slots: ``chunk_bytes`` rounded up to 4,096.
        worker: which worker this process is; None for the scheduler and for others.
        huge_page_bytes: how much of the pool lay in transparent huge pages when it was mapped.

    Args:
        slots: how many slots, at least 1.
        chunk_bytes: payload of each, at least 1.
        prefault: map every page now. A page fault in mid-copy would stall the engine.
        huge_pages: ask for transparent huge pages, which the kernel gives where it is set to.

    Raises:
        ConfigError: a number is out of range, or the memory is not there.
    """

    def __init__(
        self, slots: int, chunk_bytes: int, *, prefault: bool = True, huge_pages: bool = True
    ) -> None:
        layout = PoolLayout(slots, chunk_bytes)
        memory.check_room(layout.size_bytes)
        self._map(layout, None, None, prefault=prefault, huge_pages=huge_pages)

    @classmethod
    def create(
        cls, layout: PoolLayout, *, prefault: bool = True, huge_pages: bool = True
    ) -> HostPool:
        """Make a pool without a name, to be shared through its descriptor; be its scheduler.

        Args:
            layout: where what lies.
            prefault: as for :class:`HostPool`; if False, memory is reserved and mapped later.
            huge_pages: as for :class:`HostPool`.

        Returns:
            A pool that :meth:`attach` finds by :attr:`fd` (``pass_fds``) or by
            ``/proc/<pid>/fd/<fd>``. /dev/shm does not bound it.

        Raises:
            ConfigError: the memory is not there.
        """
        memory.check_room(layout.size_bytes)
        file = new_unnamed(layout)
        file.claim(None)
        pool = cls.__new__(cls)
        pool._map(layout, file, None, prefault=prefault, huge_pages=huge_pages, reserve=True)
        return pool

    @classmethod
    def join(
        cls,
        replica: str,
        layout: PoolLayout,
        *,
        worker: int | None = None,
        prefault: bool = True,
        huge_pages: bool = True,
        directory: str = str(_SHARED_MEMORY),
    ) -> HostPool:
        """Make a replica's pool, or map it where another of its processes came first.

        Never waits for another process. The pool has a name in ``directory`` until the scheduler
        and all workers have mapped it. What killed replicas have left there is removed first.

        Args:
            replica: an id that all processes of the replica know and no other replica has, new at
                each start: one that comes after all others have joined starts a pool of its own
                (see :meth:`absent`).
            layout: where what lies, the same in all of them.
            worker: which worker this process is; None if it is the scheduler.
            prefault: as for :meth:`create`.
            huge_pages: as for :class:`HostPool`.
            directory: on a tmpfs.

        Returns:
            The pool.

        Raises:
            ConfigError: there is no room, another process is that worker or the scheduler, or the
                processes do not agree on the layout.
        """
        if worker is not None:
            layout.check_worker(worker)
        path = Path(directory)
        check_room = partial(memory.check_room, layout.size_bytes, path)
        file = join_named(path, replica, layout, worker, check_room)
        pool = cls.__new__(cls)
        pool._map(layout, file, worker, prefault=prefault, huge_pages=huge_pages, reserve=True)
        return pool

    @classmethod
    def attach(
        cls,
        handle: int | str,
        layout: PoolLayout | None = None,
        *,
        worker: int | None = None,
        prefault: bool = True,
        huge_pages: bool = True,
    ) -> HostPool:
        """Map a pool that another process has.

        Args:
            handle: an inherited descriptor, which stays open and the caller's, or the path
                ``/proc/<pid>/fd/<n>`` of a process of this user.
            layout: what is expected; needed for a file that was not made by kvtier.
            worker: which worker this process is; None if it is none.
            prefault: as for :class:`HostPool`.
            huge_pages: as for :class:`HostPool`.

        Returns:
            The pool.

        Raises:
            ConfigError: the handle leads to no such pool, or another process is that worker.
        """
        file = open_handle(handle, layout)
        pool = cls.__new__(cls)
        try:
            if worker is not None:
                file.claim(worker)
        except BaseException:
            file.close()
            raise
        pool._map(file.layout, file, worker, prefault=prefault, huge_pages=huge_pages)
        return pool

    @staticmethod
    def check(layout: PoolLayout, *, directory: str | None = str(_SHARED_MEMORY)) -> None:
        """Say whether there is room for a pool, without making it; what the dead left is taken.

        Args:
            layout: where what lies.
            directory: where :meth:`join` would make it; None for :meth:`create`.

        Raises:
            ConfigError: there is not; it says what is needed, what is free, and what to do.
        """
        memory.check_room(layout.size_bytes, None if directory is None else Path(directory))

    def _map(
        self,
        layout: PoolLayout,
        file: PoolFile | None,
        worker: int | None,
        *,
        prefault: bool,
        huge_pages: bool,
        reserve: bool = False,
    ) -> None:
        """Map the file, or without one new memory; on failure the file is closed."""
        self.layout = layout
        self.slots: int = layout.slots
        self.chunk_bytes: int = layout.chunk_bytes
        self.row_bytes: int = layout.row_bytes
        self.worker = worker
        self._views: dict[str, memoryview] = {}
        self._file = file
        fd = None if file is None else file.fd
        self._mapping: mmap.mmap | None = None
        try:
            self._mapping = mapping = _new_mapping(layout.size_bytes, fd)
            if huge_pages:
                memory.ask_for_huge_pages(mapping)
            if prefault:
                memory.prefault(mapping, fd)
            elif reserve and fd is not None:
                memory.reserve(fd, layout.size_bytes)
            shared = fd is not None
            self.huge_page_bytes: int = memory.huge_page_bytes(mapping, shared=shared)
        except BaseException:
            self.close()
            raise

    @property
    def is_shared(self) -> bool:
        """Whether other processes can map it; not once it is closed."""
        return self._file is not None

    @property
    def fd(self) -> int:
        """The descriptor of a shared pool, closed with it; give it to a child by ``pass_fds``.

        Raises:
            KVTierError: the pool is of one process, or closed.
        """
        if self._file is None:
            raise KVTierError("the host pool is closed, or of one process: it has no descriptor")
        return self._file.fd

    def absent(self) -> list[str]:
        """Which processes of the replica do not have the pool, in words; empty when all have.

        Who is still absent when the engine starts to work has a pool of his own, or none.

        Raises:
            KVTierError: the pool is of one process, or closed.
        """
        if self._file is None:
            raise KVTierError("the host pool is closed, or of one process: nobody can be absent")
        return self._file.absent(self.worker)

    def part(self, worker: int, holder: str = "nobody named") -> npt.NDArray[np.uint8]:
        """A worker's part of all slots.

        Args:
            worker: whose, from 0.
            holder: as for :meth:`view`.

        Returns:
            An array of shape (slots, ``part_bytes``) over the pool's own memory, which it keeps
            alive; a slot's part is contiguous. Read-only for all but worker 0 where the layout
            is replicated.

        Raises:
            ConfigError: there is no such worker.
            KVTierError: the pool is closed.
        """
        start = self.layout.part_offset(worker)
        rows = np.frombuffer(self._of_holder(holder), np.uint8).reshape(self.slots, self.row_bytes)
        part = rows[:, start : start + self.layout.part_bytes]
        part.flags.writeable = not (self.layout.replicated and worker)
        return part

    def view(self, slot: int, holder: str = "nobody named") -> memoryview:
        """A slot's payload.

        Args:
            slot: index, from 0.
            holder: who gets it, one of few names; :meth:`close` says it if the view is still out.

        Returns:
            A writable view of ``chunk_bytes`` bytes, contiguous, format ``B``. It, and whatever
            is made from it, keeps the memory alive.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the pool is closed.
        """
        return self.padded_view(slot, 1, holder)

    def padded_view(self, slot: int, alignment: int, holder: str = "nobody named") -> memoryview:
        """A slot's payload and the padding behind it.

        Args:
            slot: index, from 0.
            alignment: power of two up to 4,096.
            holder: as for :meth:`view`.

        Returns:
            As :meth:`view`, its length rounded up to ``alignment``.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the pool is closed.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of a pool of {self.slots}")
        start = slot * self.row_bytes
        return self._of_holder(holder)[start : start + round_up(self.chunk_bytes, alignment)]

    def close(self) -> None:
        """Give the memory back; with views of it still out, when the last of them is gone.

        Who holds views is logged as a warning: a tier whose I/O hangs, most likely. Unmapping
        under them would be a crash. A second call does nothing.
        """
        file, self._file = self._file, None
        if file is not None:
            file.close()
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        arrays = {holder: weakref.ref(whole.obj) for holder, whole in self._views.items()}
        self._views.clear()

        def holders() -> list[str]:
            return sorted(holder for holder, array in arrays.items() if array() is not None)

        if holders():
            # Garbage is no holder: an exception's traceback leads to the frames that had the views.
            gc.collect()
        if holders():
            _log.warning(
                "the host pool was closed with views of it still out, handed to: %s; its memory "
                "is given back when the last of them is gone",
                ", ".join(holders()),
            )
        else:
            mapping.close()

    def _of_holder(self, holder: str) -> memoryview:
        """The whole mapping, through an array of this holder's own.

        A view is a slice of this one, and every slice and array made from a view keeps the array
        underneath: it lives exactly as long as the holder, or whoever had it from there, has any.
        """
        whole = self._views.get(holder)
        if whole is None:
            if self._mapping is None:
                raise KVTierError("the host pool is closed")
            # Two threads may come at once; both must go on with the same one.
            whole = self._views.setdefault(holder, np.frombuffer(self._mapping, np.uint8).data)
        return whole


def _new_mapping(size_bytes: int, fd: int | None) -> mmap.mmap:
    try:
        if fd is not None:
            return mmap.mmap(fd, size_bytes)
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"the host pool's {format_bytes(size_bytes)} cannot be mapped ({error.strerror}): "
            "use fewer slots, or raise the limits of this process (ulimit -v, overcommit)"
        ) from error
