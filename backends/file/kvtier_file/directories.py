"""Files and directories below the root, each opened through the directory above, links never."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


def open_directory(name: str, parent_fd: int, *, create: bool = False, sync: bool = False) -> int:
    """Open a directory.

    Args:
        name: a name in the directory above, not a path.
        parent_fd: the directory above.
        create: whether to make it where it is missing.
        sync: whether a directory made must survive a power failure.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: it is missing, or is a symbolic link or anything else but a directory.
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


@contextmanager
def opened_directory(
    name: str, parent_fd: int, *, create: bool = False, sync: bool = False
) -> Iterator[int]:
    """:func:`open_directory` for as long as the block lasts."""
    fd = open_directory(name, parent_fd, create=create, sync=sync)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_file(name: str, flags: int, directory_fd: int) -> Iterator[int]:
    """:func:`open_file` for as long as the block lasts."""
    fd = open_file(name, flags, directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)
