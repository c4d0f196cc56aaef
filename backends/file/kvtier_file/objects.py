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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

from kvtier_file.failures import ABSENT, FOREIGN
from kvtier_file.temporaries import TemporaryNames, stale
from kvtier_file.vectors import ask_direct, is_direct, read_into, write_from
from kvtier_sdk import ChunkNotFoundError, CorruptChunkError, OffloadKey

#: The names of all shards.
SHARDS = tuple(f"{shard:02x}" for shard in range(256))

_MANIFEST = "manifest.json"
_TEMPORARIES = "tmp"
_SUFFIX = ".kv"
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_PROBE_BYTES = 4096


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


@contextmanager
def opened_directory(
    name: str, parent_fd: int, *, create: bool = False, sync: bool = False
) -> Iterator[int]:
    """Open a directory for as long as the block lasts.

    Args:
        name: a name in the directory above, not a path.
        parent_fd: the directory above.
        create: whether to make it where it is missing.
        sync: whether a directory made must survive a power failure.

    Yields:
        A descriptor.

    Raises:
        OSError: it is missing, or is a symbolic link or anything else but a directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        fd = os.open(name, flags, dir_fd=parent_fd)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):  # another thread was faster
            os.mkdir(name, _DIRECTORY_MODE, dir_fd=parent_fd)
        if sync:
            os.fsync(parent_fd)
        fd = os.open(name, flags, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened_file(name: str, flags: int, directory_fd: int) -> Iterator[int]:
    fd = os.open(name, flags | os.O_NOFOLLOW, _FILE_MODE, dir_fd=directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)


class NamespaceDirectory:
    """The chunks of one namespace. Callable from any thread; blocks.

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

    def size(self, key: OffloadKey) -> int | None:
        """Length of a chunk's file in bytes, or ``None`` where there is no regular file.

        Raises:
            OSError: it cannot be found out.
        """
        try:
            with opened_directory(shard_of(key), self._fd) as shard_fd:
                status = os.stat(_file_name(key), dir_fd=shard_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, key: OffloadKey, buffers: Sequence[memoryview], used_ns: int) -> None:
        """Fill buffers from a chunk's file, and note its use.

        Args:
            key: the chunk.
            buffers: writable; together as long as the file must be.
            used_ns: the time to note, in nanoseconds since the epoch.

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
                _opened_file(_file_name(key), os.O_RDONLY | os.O_NONBLOCK, shard_fd) as fd,
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
                    os.utime(fd, ns=(used_ns, used_ns))
        except FileNotFoundError:
            raise ChunkNotFoundError("no such chunk") from None
        except OSError as error:
            if error.errno in FOREIGN:
                raise CorruptChunkError(
                    f"what is in the chunk's place is no chunk: {os.strerror(error.errno)}"
                ) from error
            raise

    def write(
        self,
        key: OffloadKey,
        buffers: Sequence[memoryview],
        used_ns: int,
        committing: AbstractContextManager[None],
    ) -> None:
        """Write a chunk's file under another name, then give it its own.

        Args:
            key: the chunk.
            buffers: written one after the other.
            used_ns: the time of use to note, in nanoseconds since the epoch.
            committing: entered for the moment in which the file gets its name.

        Raises:
            OSError: it is not written, and nothing is left of it; or it has its name, but whether
                that survives a power failure is not known.
        """
        with opened_directory(shard_of(key), self._fd, create=True, sync=self._sync) as shard_fd:
            self._place(buffers, used_ns, shard_fd, _file_name(key), committing, self._direct)

    def touch(self, key: OffloadKey, used_ns: int) -> bool:
        """Note a chunk's use.

        Args:
            key: the chunk.
            used_ns: the time, in nanoseconds since the epoch.

        Returns:
            Whether there is such a file.

        Raises:
            OSError: its use cannot be noted.
        """
        try:
            with opened_directory(shard_of(key), self._fd) as shard_fd:
                times = (used_ns, used_ns)
                os.utime(_file_name(key), ns=times, dir_fd=shard_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise
        return True

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
                            found.append(StoredChunk(key, status.st_size, status.st_mtime_ns))
        except OSError as error:
            if error.errno not in ABSENT:
                raise
        return found

    def sweep_temporaries(self) -> None:
        """Remove what writers that have ended left behind.

        Raises:
            OSError: some of it is still there.
        """
        with self._opened_temporaries() as temporaries_fd:
            for name in stale(os.listdir(temporaries_fd)):
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
            self._place(
                [memoryview(text.encode())], None, self._fd, _MANIFEST, nullcontext(), False
            )

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
                    with _opened_file(name, flags, temporaries_fd) as fd:
                        if direct:
                            ask_direct(fd)
                        with memoryview(written) as source, memoryview(read) as target:
                            write_from(fd, [source])
                            read_into(fd, [target])
                        return written[:] == read[:] and is_direct(fd) == direct
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=temporaries_fd)

    def _opened_temporaries(self) -> AbstractContextManager[int]:
        return opened_directory(_TEMPORARIES, self._fd, create=True, sync=self._sync)

    def _place(
        self,
        buffers: Sequence[memoryview],
        used_ns: int | None,
        directory_fd: int,
        name: str,
        committing: AbstractContextManager[None],
        direct: bool,
    ) -> None:
        with self._opened_temporaries() as temporaries_fd:
            temporary = self._temporaries.new()
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with _opened_file(temporary, flags, temporaries_fd) as fd:
                    if direct:
                        ask_direct(fd)
                    write_from(fd, buffers)
                    if used_ns is not None:
                        os.utime(fd, ns=(used_ns, used_ns))
                    if self._sync:
                        os.fsync(fd)
                with committing:
                    os.rename(temporary, name, src_dir_fd=temporaries_fd, dst_dir_fd=directory_fd)
            except BaseException:
                with suppress(OSError):  # the first error is the one to tell
                    os.unlink(temporary, dir_fd=temporaries_fd)
                raise
        if self._sync:
            os.fsync(directory_fd)


def _file_name(key: OffloadKey) -> str:
    return key.hex() + _SUFFIX


def _key_of(file_name: str) -> OffloadKey | None:
    try:
        key = bytes.fromhex(file_name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    # One spelling a key: fromhex takes capitals and spaces too.
    return key if _file_name(key) == file_name else None
