"""The file behind a shared pool: how processes find it, and when its name goes."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import leases
from kvtier_sdk.pool.layout import HEADER_BYTES, PoolLayout

_PREFIX = "kvtier-pool-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_log = logging.getLogger("kvtier.pool")


class PoolFile:
    """A pool's bytes on an open descriptor, and in a named one's case the name.

    Attributes:
        fd: the descriptor, closed on exec.
        layout: what the file holds.
    """

    def __init__(self, fd: int, layout: PoolLayout, path: Path | None = None) -> None:
        self.fd = fd
        self.layout = layout
        self.close = weakref.finalize(self, _release, fd, path, os.getpid())

    def claim(self, worker: int | None) -> None:
        """Become a member, which no two processes can be at once.

        Raises:
            ConfigError: there is no such worker, or another process is it.
        """
        if worker is not None:
            self.layout.check_worker(worker)
        if not leases.claim(self.fd, worker):
            raise ConfigError(
                f"{_member_name(worker)} of this host pool is already there: start each once, and "
                "give each replica an id of its own"
            )

    def absent(self, worker: int | None) -> list[str]:
        """Which members are not there, as seen by this one.

        Args:
            worker: who asks.
        """
        members = [None, *range(self.layout.workers)]
        return [
            _member_name(member)
            for member in members
            if member != worker and not leases.is_claimed(self.fd, member)
        ]


def new_unnamed(layout: PoolLayout) -> PoolFile:
    """A file without a name, of a size that cannot change; bounded by memory alone."""
    fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = PoolFile(fd, layout)
    try:
        _shape(fd, layout)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        file.close()
        raise
    return file


def open_handle(handle: int | str, layout: PoolLayout | None) -> PoolFile:
    """Open a file anew, by descriptor or path, so that its locks are apart; be a guest of it.

    Raises:
        ConfigError: it cannot be opened, or does not hold such a pool.
    """
    path = f"/proc/self/fd/{handle}" if isinstance(handle, int) else handle
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the host pool {handle!r} cannot be opened ({error.strerror}): it takes a descriptor "
            "that this process inherited (pass_fds) or /proc/<pid>/fd/<n> of a process that has it"
        ) from error
    try:
        # From here on nobody sweeps it: what is seen of its size stays true.
        leases.claim_as_guest(fd)
        return PoolFile(fd, _layout_of(fd, layout))
    except BaseException:
        os.close(fd)
        raise


def join_named(
    directory: Path,
    replica: str,
    layout: PoolLayout,
    worker: int | None,
    check_room: Callable[[], None],
) -> PoolFile:
    """Open the file of a replica, or make it: whoever comes first.

    The name is gone as soon as all members have the file. What a replica left that was killed
    before is swept first.

    Args:
        directory: on a tmpfs.
        replica: its id.
        layout: what all members expect.
        worker: which of them this is; None is the scheduler.
        check_room: raises a ConfigError where there is no room for a new file.

    Raises:
        ConfigError: no room, another layout, somebody else is that member, or the directory
            cannot be used.
    """
    digest = hashlib.blake2b(replica.encode(), digest_size=12).hexdigest()
    path = directory / f"{_PREFIX}{os.geteuid()}-{digest}"
    # Each round that fails does so because somebody else came to an end with this name.
    while True:
        sweep(directory)
        fd = _open_own(path)
        if fd is None:
            file = _make_named(path, layout, worker, check_room)
        else:
            file = enter_named(fd, path, layout, worker)
        if file is not None:
            return file


def sweep(directory: Path) -> None:
    """Remove the files of this user's pools that no process holds any more."""
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            fd = _open_own(path)
        except ConfigError:
            continue
        if fd is None:
            continue
        try:
            with leases.gate(fd):
                # A name that is gone already may be somebody else's new file.
                if leases.claim_whole(fd) and os.fstat(fd).st_nlink:
                    # First the bytes: whoever finds no name any more shall find the room.
                    os.ftruncate(fd, 0)
                    path.unlink()
                    _log.info("removed %s, a host pool that no process holds any more", path)
        finally:
            os.close(fd)


def _open_own(path: Path) -> int | None:
    """Open a regular file of this user.

    Returns:
        None if there is nothing of that name.

    Raises:
        ConfigError: there is something else.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} is no host pool of this user: remove it") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise ConfigError(f"{path} is no host pool of this user: remove it")


def _make_named(
    path: Path, layout: PoolLayout, worker: int | None, check_room: Callable[[], None]
) -> PoolFile | None:
    """Make a file and give it its name when it is whole; None if another came first."""
    try:
        check_room()
    except ConfigError:
        # The room may be what a member of this very replica took a moment ago.
        if os.path.lexists(path):
            return None
        raise
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"a shared host pool cannot be made in {path.parent} ({error.strerror}): "
            "it must be a directory on a tmpfs that this user may write to"
        ) from error
    file = PoolFile(fd, layout, path)
    parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _shape(fd, layout)
        file.claim(worker)
        # A directory is given only because link() follows /proc's links no other way.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=parent, follow_symlinks=True)
    except FileExistsError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    finally:
        os.close(parent)
    return file


def enter_named(fd: int, path: Path, layout: PoolLayout, worker: int | None) -> PoolFile | None:
    """Become a member of a file that was found by its name; the last to come removes the name.

    Args:
        fd: of the file; taken over, also where this raises.
        path: its name.
        layout: what all members expect.
        worker: which of them this is; None is the scheduler.

    Returns:
        None if it has no name any more.

    Raises:
        ConfigError: another layout, or somebody else is that member.
    """
    file = PoolFile(fd, layout, path)
    try:
        with leases.gate(fd):
            if os.fstat(fd).st_nlink:
                _layout_of(fd, layout)
                file.claim(worker)
                if not file.absent(worker):
                    path.unlink()
                return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _shape(fd: int, layout: PoolLayout) -> None:
    os.ftruncate(fd, layout.size_bytes + HEADER_BYTES)
    os.pwrite(fd, layout.to_header(), layout.size_bytes)


def _layout_of(fd: int, expected: PoolLayout | None) -> PoolLayout:
    """What a file holds: as its header says, or as expected where somebody else made it."""
    size_bytes = os.fstat(fd).st_size
    found = PoolLayout.from_header(os.pread(fd, HEADER_BYTES, max(0, size_bytes - HEADER_BYTES)))
    if found is None:
        if expected is None:
            raise ConfigError("the file is no host pool of kvtier: give its layout as well")
        found = expected
    elif expected not in (None, found):
        raise ConfigError(f"the host pool is {found}, and {expected} is expected")
    # To touch what is behind the end of a file is a SIGBUS.
    if size_bytes < found.size_bytes:
        raise ConfigError(f"the file has {size_bytes} bytes, and {found} needs {found.size_bytes}")
    return found


def _member_name(worker: int | None) -> str:
    return "the scheduler" if worker is None else f"worker {worker}"


def _release(fd: int, path: Path | None, pid: int) -> None:
    """Close; the last member of a pool that never became whole takes the name along."""
    try:
        # A forked child has the parent's locks: what it sees as nobody's is the parent's.
        own = path is not None and os.getpid() == pid and leases.claim_whole(fd)
        if path is not None and own and os.fstat(fd).st_nlink:
            path.unlink()
    except OSError as error:
        _log.warning("the name of the host pool %s stays behind: %s", path, error)
    finally:
        os.close(fd)
