"""A FUSE mirror of a directory, with faults on demand.

``python -m support.chaos.mirror BEHIND AT REFUSAL`` serves ``BEHIND`` at ``AT``. While the file
``REFUSAL`` contains the name of an error, all calls fail with this error. With ``EROFS``, only
calls that write fail. While the process is stopped (SIGSTOP), the file system does not answer.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy  # type: ignore[import-untyped]

_WRITING = frozenset(
    {"chmod", "create", "mkdir", "rename", "rmdir", "truncate", "unlink", "utimens", "write"}
)
_STATUS = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
_TIMES = {"st_atime": "st_atime_ns", "st_mtime": "st_mtime_ns", "st_ctime": "st_ctime_ns"}
_ROOM = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")


def _mirrored(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def mirrored(mirror: Mirror, path: str, *args: Any) -> Any:
        return call(mirror, mirror.place(call.__name__, path), *args)

    return mirrored


class Mirror(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, behind: str, refusal: Path) -> None:
        self._behind = behind
        self._refusal = refusal

    def place(self, operation: str, path: str) -> str:
        try:
            refused = getattr(errno, self._refusal.read_text())
        except OSError:
            return self._behind + path
        if refused != errno.EROFS or operation in _WRITING:
            raise mfusepy.FuseOSError(refused)
        return self._behind + path

    def init_with_config(self, info: Any, config: Any) -> None:
        config.use_ino = 1

    @_mirrored
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        status = os.lstat(path) if fh is None else os.fstat(fh)
        times = {name: getattr(status, source) for name, source in _TIMES.items()}
        return times | {name: getattr(status, name) for name in _STATUS}

    @_mirrored
    def statfs(self, path: str) -> dict[str, int]:
        room = os.statvfs(path)
        return {name: getattr(room, name) for name in _ROOM}

    @_mirrored
    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(path)]

    @_mirrored
    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    @_mirrored
    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    @_mirrored
    def unlink(self, path: str) -> None:
        os.unlink(path)

    @_mirrored
    def rename(self, old: str, new: str) -> None:
        os.rename(old, self._behind + new)

    @_mirrored
    def chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    @_mirrored
    def utimens(self, path: str, times: tuple[int, int]) -> None:
        os.utime(path, ns=times)

    @_mirrored
    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(path if fh is None else fh, length)

    @_mirrored
    def create(self, path: str, mode: int, info: Any = None) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    @_mirrored
    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags & os.O_ACCMODE)

    @_mirrored
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    @_mirrored
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    @_mirrored
    def release(self, path: str, fh: int) -> None:
        os.close(fh)


def main() -> None:
    behind, at, refusal = sys.argv[1:]
    mirror = Mirror(behind, Path(refusal))
    mfusepy.FUSE(mirror, at, foreground=True, nothreads=True, fsname="kvtier-mirror")


if __name__ == "__main__":
    main()
