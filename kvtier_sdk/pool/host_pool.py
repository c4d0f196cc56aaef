"""The host pool: the memory of the primary tier, divided into slots."""

from __future__ import annotations

import gc
import logging
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import memory
from kvtier_sdk.pool.layout import PoolLayout
from kvtier_sdk.pool.limits import check_room
from kvtier_sdk.pool.pool_file import PoolFile, join_named, make_unnamed, open_handle
from kvtier_sdk.types import Region

_SHARED_MEMORY = "/dev/shm"

_log = logging.getLogger("kvtier.pool")


class HostPool:
    """A memory mapping, divided into slots for chunks, for one or several processes.

    ``HostPool(slots, chunk_bytes)`` is for one process. :meth:`join` is for the scheduler and the
    workers of a replica. These processes share only a configuration. :meth:`create` and
    :meth:`attach` are for a process and its children. Using a closed pool raises ``KVTierError``.

    >>> pool = HostPool(slots=8, chunk_bytes=5000)
    >>> pool.view(3)[:5] = b"chunk"
    >>> bytes(pool.view(3)[:5]), pool.row_bytes
    (b'chunk', 8192)
    >>> pool.close()

    Attributes:
        layout: the geometry of the pool, which determines the next three attributes.
        slots: number of slots.
        chunk_bytes: payload of a slot, in bytes.
        row_bytes: distance from slot to slot: ``chunk_bytes`` rounded up to a multiple of 4,096.
        worker: index of this process among the workers; None if it is not a worker.

    Args:
        slots: number of slots, at least 1.
        chunk_bytes: payload of a slot in bytes, at least 1.

    Raises:
        ConfigError: a number is out of range, or there is not enough memory.
    """

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        layout = PoolLayout(slots, chunk_bytes)
        check_room(layout.size_bytes)
        self._map(layout, None)

    @classmethod
    def create(cls, layout: PoolLayout, *, prefault: bool = True) -> HostPool:
        """Create an unnamed pool for several processes, and join it as the scheduler.

        Other processes call :meth:`attach` with an inherited :attr:`fd` (``pass_fds``) or with the
        path ``/proc/<pid>/fd/<fd>``. The size of /dev/shm does not limit the pool.

        Args:
            layout: the geometry of the pool.
            prefault: true to map every page now, because a page fault during a copy would stall the
                engine; false to reserve memory now and map pages on first use.

        Raises:
            ConfigError: there is not enough memory.
        """
        check_room(layout.size_bytes)
        pool = cls.__new__(cls)
        pool._map(layout, make_unnamed(layout, reserve=not prefault), prefault=prefault)
        return pool

    @classmethod
    def join(
        cls,
        replica: str,
        layout: PoolLayout,
        *,
        worker: int | None = None,
        directory: str = _SHARED_MEMORY,
    ) -> HostPool:
        """Map a replica's pool; create the pool if no other process has created it.

        The method first removes pools in ``directory`` that killed replicas left behind. It does
        not wait for other processes. The pool has a name in ``directory`` until all have joined.

        Args:
            replica: an id that all processes of the replica share. Use a new id for each start of a
                replica. An additional process would make a second pool; see :meth:`absent`.
            layout: the geometry of the pool, the same in all processes.
            worker: index of this process among the workers; None for the scheduler.
            directory: a directory on a tmpfs.

        Raises:
            ConfigError: there is not enough room, another process has joined with the same
                ``worker``, or the processes disagree on the layout.
        """
        pool = cls.__new__(cls)
        pool._map(layout, join_named(Path(directory), replica, layout, worker))
        return pool

    @classmethod
    def attach(
        cls,
        handle: int | str,
        layout: PoolLayout | None = None,
        *,
        worker: int | None = None,
        prefault: bool = True,
    ) -> HostPool:
        """Map the pool of another process.

        Args:
            handle: an inherited descriptor, which the caller must still close, or a path
                ``/proc/<pid>/fd/<n>`` of a process of the same user.
            layout: the expected geometry; required for a file that kvtier did not make.
            worker: index of this process among the workers; None if it is not a worker.
            prefault: as for :meth:`create`.

        Raises:
            ConfigError: there is no such pool, it has another layout, or ``worker`` is taken.
        """
        pool = cls.__new__(cls)
        file = open_handle(handle, layout, worker)
        pool._map(file.layout, file, prefault=prefault)
        return pool

    @staticmethod
    def check(layout: PoolLayout, *, directory: str | None = _SHARED_MEMORY) -> None:
        """Raise a ConfigError with a remedy if there is no room for a pool of this ``layout``.

        ``directory`` is as for :meth:`join`; pass None for :meth:`create`. Memory that the pools of
        killed processes still occupy does not count as free.
        """
        check_room(layout.size_bytes, None if directory is None else Path(directory))

    def _map(self, layout: PoolLayout, file: PoolFile | None, *, prefault: bool = True) -> None:
        """Map ``file``, or private memory if it is None; close the file on failure."""
        self.layout = layout
        self.slots: int = layout.slots
        self.chunk_bytes: int = layout.chunk_bytes
        self.row_bytes: int = layout.row_bytes
        self.worker: int | None = None if file is None else file.worker
        self._view: memoryview | None = None
        self._file = file
        self._mapping: mmap.mmap | None = None
        fd = None if file is None else file.fd
        try:
            self._mapping = mapping = _new_mapping(layout.size_bytes, fd)
            memory.ask_for_huge_pages(mapping)
            if prefault:
                memory.prefault(mapping, fd)
        except BaseException:
            self.close()
            raise

    @property
    def is_shared(self) -> bool:
        """True if other processes can map the pool; False once the pool is closed."""
        return self._file is not None

    @property
    def fd(self) -> int:
        """The descriptor of a shared pool, for a child's ``pass_fds``, open until :meth:`close`."""
        return self._shared_file().fd

    @property
    def region(self) -> Region:
        """The address and the size of the whole mapping in this process."""
        return Region.of(self._whole())

    def absent(self) -> list[str]:
        """Return the names of processes that have not joined: "the scheduler", "worker 1".

        A process that is still absent when the engine starts to work has another pool or no pool.
        The method raises ``KVTierError`` if the pool is not shared.
        """
        return self._shared_file().absent()

    def part(self, worker: int) -> npt.NDArray[np.uint8]:
        """Return every slot's part for ``worker``; raise ConfigError if there is no such worker.

        The array has the shape (slots, ``part_bytes``), and keeps the pool's memory alive. Each
        slot's part is contiguous. In a replicated layout, only the array of worker 0 is writable.
        """
        start = self.layout.part_offset(worker)
        rows = np.frombuffer(self._whole(), np.uint8).reshape(self.slots, self.row_bytes)
        part = rows[:, start : start + self.layout.part_bytes]
        part.flags.writeable = not (self.layout.replicated and worker)
        return part

    def view(self, slot: int) -> memoryview:
        """Return the payload of a slot as a writable, contiguous view in format ``B``.

        The view and everything made from it keep the memory alive. A wrong slot raises IndexError.
        """
        return self.padded_view(slot, 1)

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        """Return a slot's payload and the padding after it; see :meth:`view`.

        The length is rounded up to a multiple of ``alignment``, a power of two up to 4,096.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of a pool of {self.slots}")
        start = slot * self.row_bytes
        return self._whole()[start : start + round_up(self.chunk_bytes, alignment)]

    def close(self) -> None:
        """Release the memory. If views are in use, the memory stays mapped until they are gone.

        An access to a view of unmapped memory would crash the process. Views in use also cause a
        warning in the log, because a tier's I/O probably hangs. A second call does nothing.
        """
        file, self._file = self._file, None
        if file is not None:
            file.close()
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        self._view = None
        if not _try_close(mapping):
            # Collect garbage, because a reference cycle through a traceback may keep views alive.
            gc.collect()
            if not _try_close(mapping):
                _log.warning(
                    "the host pool was closed while views of it are in use; its memory is released "
                    "when the last of them is gone"
                )

    def _whole(self) -> memoryview:
        if self._view is None:
            if self._mapping is None:
                raise KVTierError("the host pool is closed")
            self._view = memoryview(self._mapping)
        return self._view

    def _shared_file(self) -> PoolFile:
        if self._file is None:
            raise KVTierError(
                "the host pool is closed, or belongs to one process: no other process can map it"
            )
        return self._file


def _try_close(mapping: mmap.mmap) -> bool:
    try:
        mapping.close()
    except BufferError:
        return False
    return True


def _new_mapping(size_bytes: int, fd: int | None) -> mmap.mmap:
    try:
        if fd is not None:
            return mmap.mmap(fd, size_bytes)
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"the host pool's {format_bytes(size_bytes)} cannot be mapped ({error.strerror}): "
            "make the pool smaller, or raise the limits of this process (ulimit -v, overcommit)"
        ) from error
