"""One namespace's directory, each chunk a file in it.

Layout below the root::

    <fingerprint>/manifest.json     what the namespace stands for, for people
    <fingerprint>/tmp/              files that are being written
    <fingerprint>/<shard>/<key>.kv  a chunk: its header, then its payload

The shard is two hexadecimal digits of a hash of the key, the key is in hexadecimal. Every step
goes through a descriptor of the directory above, and none follows a symbolic link, so that
nothing outside the root can be put in a chunk's place.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from kvtier_file.directories import open_directory, opened_directory, opened_file
from kvtier_file.failures import ABSENT, FOREIGN
from kvtier_file.leases import TemporaryNames, stale
from kvtier_file.vectors import ask_direct, is_direct, read_into, write_from
from kvtier_sdk import ChunkNotFoundError, CorruptChunkError, OffloadKey

#: The names of all shards.
SHARDS = tuple(f"{shard:02x}" for shard in range(256))

_MANIFEST = "manifest.json"
_TEMPORARIES = "tmp"
_SUFFIX = ".kv"
_PROBE_BYTES = 4096
# In 2116. What files say beyond it is nonsense, and leaves no room for later times.
_NEVER_NS = 2**62


class StoredChunk(NamedTuple):
    """A chunk as its file shows it.

    Attributes:
        key: the chunk's name.
        size_bytes: length of the file.
        used_ns: when it was last used, in nanoseconds since the epoch.
    """

    key: OffloadKey
    size_bytes: int
    used_ns: int


def shard_of(key: OffloadKey) -> str:
    """The shard of a key. A hash, so that keys that count up spread as well as any."""
    return hashlib.blake2b(key, digest_size=1).hexdigest()


class NamespaceDirectory:
    """The chunks of one namespace. Made for one call of the tier, in one thread; blocks.

    Args:
        fd: the namespace's directory, open for as long as this object is used.
        temporaries: where names of temporaries come from.
        direct: whether chunks go past the page cache where the file system lets them.
        sync: whether what is written must survive a power failure.
    """

    def __init__(self, fd: int, temporaries: TemporaryNames, *, direct: bool, sync: bool) -> None:
        self._fd = fd
        self._temporaries = temporaries
        self._direct = direct
        self._sync = sync
        self._temporaries_fd: int | None = None
        # Those that were seen to be there; one that goes after that is made again later.
        self._shards: set[str] = set()

    def close(self) -> None:
        """Let go of what was opened below the directory."""
        if self._temporaries_fd is not None:
            os.close(self._temporaries_fd)
            self._temporaries_fd = None

    def size(self, key: OffloadKey) -> int | None:
        """Length of a chunk's file in bytes, or ``None`` where there is no regular file.

        Raises:
            OSError: it cannot be found out.
        """
        status = self._status(key)
        return status.st_size if status and stat.S_ISREG(status.st_mode) else None

    def read(self, key: OffloadKey, buffers: Sequence[memoryview], used_ns: int) -> None:
        """Fill buffers from a chunk's file, and note its use.

        Args:
            key: the chunk.
            buffers: writable; together as long as the file must be.
            used_ns: as for :meth:`touch`.

        Raises:
            ChunkNotFoundError: there is no such file.
            CorruptChunkError: the file has another length, or is no regular file.
            OSError: it cannot be read.
        """
        expected_bytes = sum(map(len, buffers))
        try:
            with (
                opened_directory(shard_of(key), self._fd) as shard_fd,
                # O_NONBLOCK, so that a pipe in the file's place does not hold us up.
                opened_file(_file_name(key), os.O_RDONLY | os.O_NONBLOCK, shard_fd) as fd,
            ):
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise CorruptChunkError("what is in the chunk's place is no regular file")
                if status.st_size != expected_bytes:
                    raise CorruptChunkError(
                        f"{status.st_size} bytes stored; expected {expected_bytes}"
                    )
                if self._direct:
                    ask_direct(fd)
                read_into(fd, buffers)
                with suppress(OSError):  # the chunk is here; its age matters less
                    os.utime(fd, ns=_times(status, used_ns))
        except FileNotFoundError:
            raise ChunkNotFoundError("no such chunk") from None
        except OSError as error:
            if error.errno in FOREIGN:
                raise CorruptChunkError(
                    f"what is in the chunk's place is no chunk: {os.strerror(error.errno)}"
                ) from error
            raise

    def write(self, key: OffloadKey, buffers: Sequence[memoryview], used_ns: int) -> str:
        """Write what is to become a chunk's file, under another name.

        Args:
            key: the chunk; a directory for it is made too.
            buffers: written one after the other.
            used_ns: the time of use to note, in nanoseconds since the epoch.

        Returns:
            The name, for :meth:`place` or :meth:`discard`.

        Raises:
            OSError: it is not written, and nothing is left of it.
        """
        shard = shard_of(key)
        if shard not in self._shards:
            with opened_directory(shard, self._fd, create=True, sync=self._sync):
                self._shards.add(shard)
        return self._write_temporary(buffers, used_ns, direct=self._direct)

    def place(self, temporary: str, key: OffloadKey) -> None:
        """Give a file that was written a chunk's name.

        Raises:
            OSError: it cannot have it, and is no more.
        """
        try:
            with opened_directory(shard_of(key), self._fd, create=True) as shard_fd:
                self._rename(temporary, shard_fd, _file_name(key))
        except OSError:
            self.discard(temporary)
            raise

    def discard(self, temporary: str) -> None:
        """Remove a file that was written and is not wanted."""
        with suppress(OSError), self._opened_temporaries() as temporaries_fd:
            os.unlink(temporary, dir_fd=temporaries_fd)

    def sync_name(self, key: OffloadKey) -> None:
        """Let a chunk's name survive a power failure, where that is asked for.

        Raises:
            OSError: whether it does is not known.
        """
        if self._sync:
            with opened_directory(shard_of(key), self._fd) as shard_fd:
                os.fsync(shard_fd)

    def touch(self, key: OffloadKey, used_ns: int) -> bool:
        """Note a chunk's use.

        Args:
            key: the chunk.
            used_ns: the time, in nanoseconds since the epoch; where the file has a later one, the
                one after that is noted.

        Returns:
            Whether there is such a file.

        Raises:
            OSError: its use cannot be noted.
        """
        try:
            with opened_directory(shard_of(key), self._fd) as shard_fd:
                name = _file_name(key)
                status = os.stat(name, dir_fd=shard_fd, follow_symlinks=False)
                times = _times(status, used_ns)
                os.utime(name, ns=times, dir_fd=shard_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise
        return True

    def used_ns(self, key: OffloadKey) -> int | None:
        """When a chunk was last used, in nanoseconds since the epoch; ``None`` where it is gone.

        Raises:
            OSError: it cannot be found out.
        """
        status = self._status(key)
        return None if status is None else _used_ns(status)

    def remove(self, key: OffloadKey) -> bool:
        """Remove what is in a chunk's place, unless it is a directory.

        Args:
            key: the chunk.

        Returns:
            Whether there was something.

        Raises:
            OSError: it is still there.
        """
        try:
            with opened_directory(shard_of(key), self._fd) as shard_fd:
                os.unlink(_file_name(key), dir_fd=shard_fd)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise
        return True

    def list_shard(self, shard: str) -> list[StoredChunk]:
        """The chunks of one shard, in any order; foreign files are left out.

        Args:
            shard: one of :data:`SHARDS`.

        Raises:
            OSError: it cannot be read.
        """
        found = []
        try:
            with (
                opened_directory(shard, self._fd) as shard_fd,
                os.scandir(shard_fd) as entries,
            ):
                for entry in entries:
                    key = _key_of(entry.name)
                    if key is None or shard_of(key) != shard:
                        continue
                    with suppress(FileNotFoundError):  # removed since it was listed
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append(StoredChunk(key, status.st_size, _used_ns(status)))
        except OSError as error:
            if error.errno not in ABSENT:
                raise
        return found

    def sweep_temporaries(self, is_held: Callable[[str], bool]) -> None:
        """Remove what writers that have ended left behind.

        Args:
            is_held: whether a lease's process lives.

        Raises:
            OSError: some of it is still there.
        """
        with (
            # A full file system may have had room for the namespace alone: that keeps nobody out.
            suppress(FileNotFoundError),
            self._opened_temporaries(create=False) as temporaries_fd,
        ):
            for name in stale(os.listdir(temporaries_fd), is_held):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=temporaries_fd)

    def write_manifest(self, text: str) -> None:
        """Write the manifest, unless there is one.

        Args:
            text: what it says.

        Raises:
            OSError: it cannot be written.
        """
        try:
            os.stat(_MANIFEST, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            temporary = self._write_temporary([memoryview(text.encode())], None, direct=False)
            self._rename(temporary, self._fd, _MANIFEST)
            if self._sync:
                os.fsync(self._fd)

    def probe(self, *, direct: bool) -> bool:
        """Write a page, read it back and remove it.

        Args:
            direct: whether to go past the page cache.

        Returns:
            Whether the page came back, in the way that was asked for.

        Raises:
            OSError: it cannot be written or read.
        """
        name = self._temporaries.new()
        # Anonymous memory is aligned to pages, as O_DIRECT wants it.
        with mmap.mmap(-1, _PROBE_BYTES) as written, mmap.mmap(-1, _PROBE_BYTES) as read:
            written[:] = os.urandom(_PROBE_BYTES)
            with self._opened_temporaries() as temporaries_fd:
                try:
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                    with opened_file(name, flags, temporaries_fd) as fd:
                        if direct:
                            ask_direct(fd)
                        with memoryview(written) as source, memoryview(read) as target:
                            write_from(fd, [source])
                            read_into(fd, [target])
                        return written[:] == read[:] and is_direct(fd) == direct
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=temporaries_fd)

    def _opened_temporaries(self, *, create: bool = True) -> AbstractContextManager[int]:
        if self._temporaries_fd is None:
            self._temporaries_fd = open_directory(
                _TEMPORARIES, self._fd, create=create, sync=self._sync
            )
        return nullcontext(self._temporaries_fd)

    def _status(self, key: OffloadKey) -> os.stat_result | None:
        shard = shard_of(key)
        try:
            with opened_directory(shard, self._fd) as shard_fd:
                self._shards.add(shard)
                return os.stat(_file_name(key), dir_fd=shard_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise

    def _write_temporary(
        self, buffers: Sequence[memoryview], used_ns: int | None, *, direct: bool
    ) -> str:
        temporary = self._temporaries.new()
        with self._opened_temporaries() as temporaries_fd:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with opened_file(temporary, flags, temporaries_fd) as fd:
                    if direct:
                        ask_direct(fd)
                    write_from(fd, buffers)
                    if used_ns is not None:
                        os.utime(fd, ns=(used_ns, used_ns))
                    if self._sync:
                        os.fsync(fd)
            except BaseException:
                with suppress(OSError):  # the first error is the one to tell
                    os.unlink(temporary, dir_fd=temporaries_fd)
                raise
        return temporary

    def _rename(self, temporary: str, directory_fd: int, name: str) -> None:
        with self._opened_temporaries() as temporaries_fd:
            os.rename(temporary, name, src_dir_fd=temporaries_fd, dst_dir_fd=directory_fd)


def _used_ns(status: os.stat_result) -> int:
    return status.st_mtime_ns if status.st_mtime_ns < _NEVER_NS else 0


def _times(status: os.stat_result, used_ns: int) -> tuple[int, int]:
    """A use never makes a chunk older, even by a clock that is behind."""
    used_ns = max(used_ns, _used_ns(status) + 1)
    return used_ns, used_ns


def _file_name(key: OffloadKey) -> str:
    return key.hex() + _SUFFIX


def _key_of(file_name: str) -> OffloadKey | None:
    try:
        key = bytes.fromhex(file_name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    # One spelling a key: fromhex takes capitals and spaces too.
    return key if _file_name(key) == file_name else None
