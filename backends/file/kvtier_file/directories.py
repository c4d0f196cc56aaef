"""Opens files and directories relative to their parent's descriptor, without following links."""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvtier_file.config import FileTierConfig

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


class UntrustedDirectoryError(PermissionError):
    """Raised if ``permissions`` is ``strict`` and other users could change a directory."""


class Directories:
    """The root and the directories in it. Each open checks the owner and the write permissions.

    A check at the start is not enough, because a directory may be removed while the tier runs.
    Another user can then recreate the directory and plant chunks there.
    """

    def __init__(self, config: FileTierConfig, logger: logging.Logger) -> None:
        self.sync = config.fsync  # true to make new directories survive a power failure
        self.is_strict = config.permissions == "strict"  # true to refuse untrusted directories
        self._logger = logger
        self._has_warned = False

    def open_root(self, root: Path) -> int:
        """Open the root, which may be a symbolic link."""
        return self._checked(os.open(root, os.O_RDONLY | os.O_DIRECTORY), str(root))

    def open(self, name: str, parent_fd: int, *, create: bool = False) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            fd = os.open(name, flags, dir_fd=parent_fd)
        except FileNotFoundError:
            if not create:
                raise
            with suppress(FileExistsError):  # another thread or process made the directory
                os.mkdir(name, _DIRECTORY_MODE, dir_fd=parent_fd)
            if self.sync:
                os.fsync(parent_fd)
            fd = os.open(name, flags, dir_fd=parent_fd)
        return self._checked(fd, name)

    def _checked(self, fd: int, name: str) -> int:
        fault = _permission_fault(fd)
        if fault is None or (self._has_warned and not self.is_strict):
            return fd
        with suppress(OSError):  # without /proc, keep the given name
            name = os.readlink(f"/proc/self/fd/{fd}")
        text = f"directory '{name}' {fault}, who could plant or read chunks"
        if self.is_strict:
            os.close(fd)
            raise UntrustedDirectoryError(
                errno.EACCES,
                f"{text}; let it belong to this user (id {os.geteuid()}) with mode 0700, or write "
                "permissions: 'warn' to use it all the same",
            )
        self._has_warned = True
        self._logger.warning("%s", text)
        return fd


def open_file(name: str, flags: int, directory_fd: int, *, direct: bool = False) -> int:
    """Open a file, with O_DIRECT if ``direct`` is true and the file system accepts the flag."""
    flags |= os.O_NOFOLLOW
    if direct:
        try:
            return os.open(name, flags | os.O_DIRECT, _FILE_MODE, dir_fd=directory_fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The refused call may have created the file, so O_EXCL would fail.
        flags &= ~os.O_EXCL
    return os.open(name, flags, _FILE_MODE, dir_fd=directory_fd)


def _permission_fault(fd: int) -> str | None:
    """Return the reason why other users could change a directory; ``None`` if they cannot."""
    status = os.fstat(fd)
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user, with id {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


class ClosingFd:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
