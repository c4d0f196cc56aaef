"""Creates, finds and unlinks the file behind a shared pool."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import leases, memory
from kvtier_sdk.pool.layout import HEADER_BYTES, PoolLayout
from kvtier_sdk.pool.limits import check_room

_PREFIX = "kvtier-pool-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_log = logging.getLogger("kvtier.pool")


class PoolFile:
    """An open memory file of an engine's replica, and one process's lease on the file.

    The last process to enter a replica removes the file's name, so the kernel frees the memory when
    the last process ends, even after a crash.

    Attributes:
        close: ends the lease and closes the descriptor. Garbage collection and ``exec`` do both
            too. A second call does nothing.
    """

    def __init__(
        self, fd: int, layout: PoolLayout, worker: int | None, path: Path | None = None
    ) -> None:
        self.fd = fd
        self.layout = layout
        self.worker = worker
        self.close = weakref.finalize(self, _release, fd, path, os.getpid())

    @classmethod
    def enter(cls, fd: int, path: str | Path, *, workers: int, worker: int | None) -> PoolFile:
        """Enter a replica whose scheduler and ``workers`` workers share the engine's own file.

        Args:
            fd: a descriptor of the file. The caller still owns it, and must close it.
            path: the file's path, which the engine must not remove.
            worker: index of this process among the workers, from 0; ``None`` for the scheduler.

        Raises:
            ConfigError: ``worker`` is taken, or all processes of the replica have entered.
        """
        # Only the number of workers matters here, because the engine defines the memory's layout.
        file = enter_named(os.dup(fd), Path(path), PoolLayout(1, 1, workers), worker)
        if file is None:
            raise ConfigError(f"{path} has all its members: give each replica a different id")
        return file

    def absent(self) -> list[str]:
        """Return the names of processes that have not entered: "the scheduler", "worker 1"."""
        members = [None, *range(self.layout.workers)]
        return [
            _member_name(member)
            for member in members
            if member != self.worker and not leases.is_claimed(self.fd, member)
        ]


def make_unnamed(layout: PoolLayout, *, reserve: bool) -> PoolFile:
    fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with _closed_on_failure(fd):
        _shape(fd, layout)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        if reserve:
            memory.reserve(fd, layout.size_bytes)
        _claim(fd, layout, None)
    return PoolFile(fd, layout, None)


def open_handle(handle: int | str, layout: PoolLayout | None, worker: int | None) -> PoolFile:
    path = f"/proc/self/fd/{handle}" if isinstance(handle, int) else handle
    try:
        # Reopen the file even for a descriptor, because duplicates of a descriptor share locks.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the host pool {handle!r} cannot be opened ({error.strerror}): give a descriptor that "
            "this process inherited (pass_fds) or /proc/<pid>/fd/<n> of a process that has the pool"
        ) from error
    with _closed_on_failure(fd):
        # Claim first, because a sweep truncates a file on which no process holds a lease.
        leases.claim_as_guest(fd)
        found = _layout_of(fd, layout)
        if worker is not None:
            _claim(fd, found, worker)
    return PoolFile(fd, found, worker)


def join_named(directory: Path, replica: str, layout: PoolLayout, worker: int | None) -> PoolFile:
    """Open a replica's file and join it; create the file if no other process has created it."""
    digest = hashlib.blake2b(replica.encode(), digest_size=12).hexdigest()
    path = directory / f"{_PREFIX}{os.geteuid()}-{digest}"
    # Try again: an attempt fails only if another process creates or removes the file meanwhile.
    while True:
        sweep(directory)
        fd = _open_own(path)
        if fd is None:
            file = _make_named(path, layout, worker)
        else:
            file = enter_named(fd, path, layout, worker)
        if file is not None:
            return file


def sweep(directory: Path) -> None:
    """Remove this user's unused pool files, which killed replicas leave behind."""
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            fd = _open_own(path)
        except ConfigError:
            continue
        if fd is None:
            continue
        try:
            with leases.joining(fd):
                # Skip a file without links: its name is gone, and ``path`` may name a newer file.
                if leases.claim_whole(fd) and os.fstat(fd).st_nlink:
                    # Truncate first, so that the memory is freed before the name disappears.
                    os.ftruncate(fd, 0)
                    path.unlink()
                    _log.info("removed %s, a host pool that no process holds", path)
        finally:
            os.close(fd)


def enter_named(fd: int, path: Path, layout: PoolLayout, worker: int | None) -> PoolFile | None:
    """Join a file, and unlink it if all have joined; return ``None`` if it was already unlinked."""
    file = PoolFile(fd, layout, worker, path)
    with ExitStack() as undo:
        undo.callback(file.close)
        with leases.joining(fd):
            if not os.fstat(fd).st_nlink:
                return None
            _layout_of(fd, layout)
            _claim(fd, layout, worker)
            if not file.absent():
                path.unlink()
        undo.pop_all()
    return file


def _open_own(path: Path) -> int | None:
    """Open a file that belongs to this user; return ``None`` if the file does not exist."""
    fault = f"{path} is not a host pool of this user: remove it"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(fault) from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise ConfigError(fault)


def _make_named(path: Path, layout: PoolLayout, worker: int | None) -> PoolFile | None:
    """Create and join the file; return ``None`` if another process created it first."""
    directory = path.parent
    try:
        check_room(layout.size_bytes, directory)
    except ConfigError:
        # The room may be gone because another process just made this pool. If so, join it.
        if os.path.lexists(path):
            return None
        raise
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"a shared host pool cannot be made in {directory} ({error.strerror}): "
            "it must be a directory on a tmpfs that this user may write to"
        ) from error
    try:
        with _closed_on_failure(fd):
            _shape(fd, layout)
            _claim(fd, layout, worker)
            # Pass a descriptor, because os.link otherwise does not follow the link in /proc. The
            # kernel ignores the descriptor, because the path is absolute.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return None
    return PoolFile(fd, layout, worker, path)


def _shape(fd: int, layout: PoolLayout) -> None:
    os.ftruncate(fd, layout.size_bytes + HEADER_BYTES)
    os.pwrite(fd, layout.to_header(), layout.size_bytes)


def _layout_of(fd: int, expected: PoolLayout | None) -> PoolLayout:
    """Return the layout in the file's header; if there is no header, return ``expected``."""
    size_bytes = os.fstat(fd).st_size
    found = PoolLayout.from_header(os.pread(fd, HEADER_BYTES, max(0, size_bytes - HEADER_BYTES)))
    if found is None:
        if expected is None:
            raise ConfigError("the file is not a host pool of kvtier: give its layout as well")
        found = expected
    elif expected not in (None, found):
        raise ConfigError(f"the host pool is {found}; expected {expected}")
    # Refuse a short file, because an access beyond its end would kill the process with SIGBUS.
    if size_bytes < found.size_bytes:
        raise ConfigError(f"the file has {size_bytes} bytes; {found} needs {found.size_bytes}")
    return found


def _claim(fd: int, layout: PoolLayout, worker: int | None) -> None:
    if worker is not None:
        layout.check_worker(worker)
    if not leases.claim(fd, worker):
        raise ConfigError(
            f"{_member_name(worker)} of this host pool is already there: start each once, and "
            "give each replica a different id"
        )


def _member_name(worker: int | None) -> str:
    return "the scheduler" if worker is None else f"worker {worker}"


@contextmanager
def _closed_on_failure(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _release(fd: int, path: Path | None, pid: int) -> None:
    """Close the file, and remove its name unless another process holds the file."""
    try:
        # A forked child must not remove the name. It shares its parent's locks, so it cannot detect
        # that the parent still uses the file.
        own = path is not None and os.getpid() == pid and leases.claim_whole(fd)
        if path is not None and own and os.fstat(fd).st_nlink:
            path.unlink()
    except OSError as error:
        _log.warning("the name of the host pool %s could not be removed: %s", path, error)
    finally:
        os.close(fd)
