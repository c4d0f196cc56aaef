"""The temporary files of a namespace: chunks that do not have their final names yet.

A new chunk may overwrite a *spare*, the file of an evicted chunk. On a full disk, this is several
times as fast as removing a file and creating another (docs/design/2026-11-23-file-io.md).
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from kvtier_file import compiled
from kvtier_file.chunks import stored_time_ns
from kvtier_file.compiled import DONE
from kvtier_file.directories import ClosingFd, Directories, open_file
from kvtier_file.file_io import ALIGNMENT, has_direct_io, read_buffers, take_over, write_buffers
from kvtier_sdk import Transfer

_DIRECTORY = "tmp"
_TEMPORARY = re.compile(r"([0-9a-f]{16})-\d+\.tmp")
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL


def temporary_names(lease: str) -> Iterator[str]:
    # Unlike a generator, this iterator is thread-safe.
    return map(f"{lease}-{{}}.tmp".format, itertools.count())


class Temporaries:
    """The directory of temporary files in one namespace, opened when it is first needed."""

    def __init__(self, namespace_fd: int, names: Iterator[str], directories: Directories) -> None:
        self._namespace_fd = namespace_fd
        self._names = names
        self._directories = directories
        self._sync = directories.sync
        self._fd: int | None = None
        self._spares: list[str] = []

    def close(self) -> None:
        for name in self._spares:
            self.discard(name)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def adopt(self, name: str, directory_fd: int) -> bool:
        """Move an evicted chunk's file here as a spare; return false if that is not possible."""
        # With ``sync``, adopt nothing: after a power failure the old name could have new content.
        if self._sync:
            return False
        spare = next(self._names)
        try:
            status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                return False
            self._spares.append(spare)
            os.rename(name, spare, src_dir_fd=directory_fd, dst_dir_fd=self.open())
        except OSError:
            return False
        return True

    def write(
        self, buffers: Sequence[memoryview], *, direct: bool = False, used_ns: int | None = None
    ) -> str:
        """Write buffers to a new file, or over a spare; return the file's name."""
        name, fd = self._open_spare(sum(map(len, buffers)), direct) or self._open_new(direct)
        try:
            with ClosingFd(fd):
                write_buffers(fd, buffers)
                if used_ns is not None:
                    os.utime(fd, ns=(stored_time_ns(used_ns), used_ns))
                if self._sync:
                    os.fsync(fd)
        except BaseException:
            self.discard(name)
            raise
        return name

    def write_batch(
        self, batch: Sequence[Transfer], times_ns: Sequence[int], digest_bytes: int, *, direct: bool
    ) -> Sequence[str | None]:
        # With ``sync``, a batch would save little time: most time is spent waiting for the disk.
        if compiled.batch_io is None or self._sync:
            return [None] * len(batch)
        files = tuple(
            (*self._take_name(), store, used_ns)
            for store, used_ns in zip(batch, times_ns, strict=True)
        )
        flags = os.O_DIRECT if direct else 0
        outcomes = compiled.batch_io.write(self.open(), digest_bytes, flags, files)
        return [
            name if outcome == DONE else None
            for (name, *_), outcome in zip(files, outcomes, strict=True)
        ]

    def rename(self, temporary: str, name: str, directory_fd: int) -> None:
        os.rename(temporary, name, src_dir_fd=self.open(), dst_dir_fd=directory_fd)

    def discard(self, name: str) -> None:
        """Remove a file. If that fails, another process removes it after this process ends."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self.open())

    def sweep(self, is_held: Callable[[str], bool]) -> None:
        try:
            directory_fd = self.open(create=False)
        except (FileNotFoundError, NotADirectoryError):
            return  # the disk had no room for the directory, or a foreign file has its name
        for name in os.listdir(directory_fd):
            match = _TEMPORARY.fullmatch(name)
            if match and not is_held(match[1]):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory_fd)

    def probe(self, *, direct: bool) -> bool:
        """Write and read a page, with O_DIRECT if ``direct`` is true; return true if that works."""
        name = next(self._names)
        directory_fd = self.open()
        # Anonymous memory is aligned to pages, as O_DIRECT requires.
        with mmap.mmap(-1, ALIGNMENT) as written, mmap.mmap(-1, ALIGNMENT) as read:
            written[:] = os.urandom(ALIGNMENT)
            try:
                with ClosingFd(open_file(name, _NEW_FILE, directory_fd, direct=direct)) as fd:
                    with memoryview(written) as source, memoryview(read) as target:
                        write_buffers(fd, [source])
                        read_buffers(fd, [target])
                    return written[:] == read[:] and has_direct_io(fd) == direct
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory_fd)

    def keeps_times(self, used_ns: int) -> bool:
        """Return true if a file keeps its times to the nanosecond, even after a read."""
        name = self.write([memoryview(b"times")], used_ns=used_ns)
        try:
            with ClosingFd(open_file(name, os.O_RDONLY | os.O_NOATIME, self.open())) as fd:
                os.read(fd, 1)
                status = os.fstat(fd)
        finally:
            self.discard(name)
        return (status.st_atime_ns, status.st_mtime_ns) == (stored_time_ns(used_ns), used_ns)

    def _take_name(self) -> tuple[str, bool]:
        """Return a spare's name and true, or a new name and false."""
        if self._spares:
            return self._spares.pop(), True
        return next(self._names), False

    def _open_new(self, direct: bool) -> tuple[str, int]:
        name = next(self._names)
        try:
            return name, open_file(name, _NEW_FILE, self.open(), direct=direct)
        except OSError:
            self.discard(name)
            raise

    def _open_spare(self, size_bytes: int, direct: bool) -> tuple[str, int] | None:
        """Open and truncate a spare; remove spares that cannot be overwritten."""
        flags = os.O_WRONLY | os.O_NONBLOCK
        while self._spares:
            name = self._spares.pop()
            with suppress(OSError):
                fd = open_file(name, flags, self.open(), direct=direct)
                if take_over(fd, size_bytes):
                    return name, fd
                os.close(fd)
            self.discard(name)
        return None

    def open(self, *, create: bool = True) -> int:
        if self._fd is None:
            self._fd = self._directories.open(_DIRECTORY, self._namespace_fd, create=create)
        return self._fd
