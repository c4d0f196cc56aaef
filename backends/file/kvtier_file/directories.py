"""Files and directories below the root, each opened through its parent; links are not followed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


def open_directory(name: str, parent_fd: int, *, create: bool = False, sync: bool = False) -> int:
    """Open a directory.

    Args:
        name: a name in the parent, not a path.
        parent_fd: the parent.
        create: make the directory if it is missing.
        sync: let a directory made here survive a power failure.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: it is missing, or is not a directory (a symbolic link, for example).
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent_fd)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):  # another thread or process was faster
            os.mkdir(name, _DIRECTORY_MODE, dir_fd=parent_fd)
        if sync:
            os.fsync(parent_fd)
        return os.open(name, flags, dir_fd=parent_fd)


def open_file(name: str, flags: int, directory_fd: int) -> int:
    """Open a file.

    Args:
        name: a name in the directory, not a path.
        flags: as for :func:`os.open`.
        directory_fd: the directory.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    return os.open(name, flags | os.O_NOFOLLOW, _FILE_MODE, dir_fd=directory_fd)


def permission_fault(fd: int) -> str | None:
    """Return why other users could change what is in a directory, or ``None``.

    Args:
        fd: the directory.

    Returns:
        A clause that follows the directory's name: ``"belongs to another user, with id 1000"``.
    """
    status = os.fstat(fd)
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user, with id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


class ClosingFd:
    """Closes a descriptor at the end of a ``with`` block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
