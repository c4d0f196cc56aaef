"""The directory of one namespace; each chunk is a file in it.

Layout below the root::

    <fingerprint>/manifest.json     the facts of the namespace, for human readers
    <fingerprint>/tmp/              files being written
    <fingerprint>/<shard>/<key>.kv  a chunk: its header, then its payload

The shard is two hexadecimal digits of a hash of the key, and the key is in hexadecimal. Every file
is opened through its parent's descriptor, and symbolic links are not followed: a file outside of
the root is never read as a chunk.

The batch methods handle the usual cases in one call of the tier's compiled part. The caller handles
chunks with the outcome ``NOT_DONE`` one by one; without the compiled part, every chunk has this
outcome.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import compress

from kvtier_file import compiled
from kvtier_file.chunks import Lifetime, StoredChunk, next_use_ns
from kvtier_file.directories import ClosingFd, Directories, open_file
from kvtier_file.errors import FOREIGN, absence_ignored
from kvtier_file.file_io import read_buffers
from kvtier_file.temporaries import Temporaries
from kvtier_sdk import ChunkNotFoundError, CorruptChunkError, OffloadKey, StoredNamespace, Transfer

SHARDS = tuple(f"{shard:02x}" for shard in range(256))

_MANIFEST = "manifest.json"
_SUFFIX = ".kv"


class NamespaceDirectory:
    """One namespace's directory, open for one call of the tier in one thread. Methods block."""

    def __init__(
        self,
        fingerprint: str,
        fd: int,
        names: Iterator[str],
        directories: Directories,
        lifetime: Lifetime,
        lengths: range,
        *,
        direct: bool,
    ) -> None:
        self.fingerprint = fingerprint
        self.lifetime = lifetime
        self.lengths = lengths  # the valid file lengths in the tier's own namespace
        self._fd = fd
        self._directories = directories
        self._direct = direct
        # Shards that this call found or made. If another process removes one, `place` recreates it.
        self._shards: set[str] = set()
        self.temporaries = Temporaries(fd, names, directories)

    def find(self, key: OffloadKey) -> StoredChunk | None:
        """Return a key's chunk, or ``None`` if its file is missing or is not a regular file."""
        with absence_ignored(), self._shard(key) as shard_fd:
            status = os.stat(_file_name(key), dir_fd=shard_fd, follow_symlinks=False)
            return self._stored(key, status)
        return None

    def read(self, load: Transfer, used_ns: int | None) -> None:
        """Read a chunk into its buffers; record the use unless ``used_ns`` is ``None``."""
        try:
            with (
                self._shard(load.key) as shard_fd,
                ClosingFd(self._open(_file_name(load.key), shard_fd)) as fd,
            ):
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise CorruptChunkError("the file in the chunk's place is not a regular file")
                load.received(status.st_size)
                if status.st_size not in self.lengths:
                    raise CorruptChunkError(
                        f"{status.st_size} bytes stored; expected a multiple of {self.lengths.step}"
                    )
                if self.lifetime.used_ns(status) < self.lifetime.expired_ns:
                    raise ChunkNotFoundError("the chunk has expired")
                read_buffers(fd, (load.header, load.arrived))
                if used_ns is not None:
                    with suppress(OSError):  # the chunk is loaded, even if its use is not recorded
                        os.utime(fd, ns=self._times(status, used_ns))
        except FileNotFoundError:
            raise ChunkNotFoundError("no such chunk") from None
        except OSError as error:
            if error.errno in FOREIGN:
                raise CorruptChunkError(
                    f"the file in the chunk's place is not a chunk: {os.strerror(error.errno)}"
                ) from error
            raise

    def read_batch(
        self, batch: Sequence[Transfer], times_ns: Sequence[int], digest_bytes: int
    ) -> tuple[bytes, Sequence[int], Sequence[bytes | None]]:
        """Read a batch and record the uses; return outcomes, file lengths and digests."""
        if compiled.batch_io is None:
            return bytes(len(batch)), [0] * len(batch), [None] * len(batch)
        files = tuple(
            (shard_of(load.key), _file_name(load.key), load.header, load.payload, used_ns)
            for load, used_ns in zip(batch, times_ns, strict=True)
        )
        direct = os.O_DIRECT if self._direct else 0
        strict = self._directories.is_strict
        outcomes, lengths, digests = compiled.batch_io.read(
            self._fd, digest_bytes, direct, strict, self.lifetime, files
        )
        return outcomes, memoryview(lengths).cast("q"), compiled.split(digests, len(batch))

    def write(self, key: OffloadKey, buffers: Sequence[memoryview], used_ns: int) -> str:
        """Create a chunk's shard and write a temporary file; return the file's name."""
        self._make_shard(key)
        return self.temporaries.write(buffers, direct=self._direct, used_ns=used_ns)

    def write_batch(
        self, batch: Sequence[Transfer], times_ns: Sequence[int], digest_bytes: int
    ) -> Sequence[str | None]:
        """Write a batch; return each temporary file's name, or ``None`` for an unwritten chunk."""
        try:
            for store in batch:
                self._make_shard(store.key)
            return self.temporaries.write_batch(batch, times_ns, digest_bytes, direct=self._direct)
        except OSError:
            return [None] * len(batch)

    def place(self, temporary: str, key: OffloadKey) -> None:
        with self._shard(key, create=True) as shard_fd:
            self.temporaries.rename(temporary, _file_name(key), shard_fd)

    def place_batch(self, written: Sequence[tuple[str, OffloadKey]]) -> bytes:
        """Rename the chunks' files to their final names; return an outcome for each file."""
        files = tuple((name, shard_of(key), _file_name(key)) for name, key in written)
        strict = self._directories.is_strict
        with suppress(OSError):
            if compiled.batch_io is not None:
                return compiled.batch_io.place(self.temporaries.open(), self._fd, strict, files)
        return bytes(len(written))

    def sync_name(self, key: OffloadKey) -> None:
        """Make a chunk's name survive a power failure."""
        with self._shard(key) as shard_fd:
            os.fsync(shard_fd)

    def touch(self, key: OffloadKey, used_ns: int) -> bool:
        """Record a use of a chunk; return false if its file is missing, incomplete or expired."""
        with absence_ignored(), self._shard(key) as shard_fd:
            name = _file_name(key)
            status = os.stat(name, dir_fd=shard_fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size not in self.lengths:
                return False
            if self.lifetime.used_ns(status) < self.lifetime.expired_ns:
                return False
            times = self._times(status, used_ns)
            os.utime(name, ns=times, dir_fd=shard_fd, follow_symlinks=False)
            return True
        return False

    def touch_batch(self, keys: Sequence[OffloadKey], times_ns: Sequence[int] | None) -> bytes:
        """Return an outcome for each key's file; record the uses if ``times_ns`` is given."""
        if compiled.batch_io is None:
            return bytes(len(keys))
        shards = list(map(shard_of, keys))
        uses_ns = times_ns or [-1] * len(keys)
        files = tuple(zip(shards, map(_file_name, keys), uses_ns, strict=True))
        strict = self._directories.is_strict
        lengths = self.lengths[0], self.lengths[-1]
        outcomes = compiled.batch_io.touch(self._fd, lengths, strict, self.lifetime, files)
        self._shards.update(compress(shards, outcomes))
        return outcomes

    def remove(self, key: OffloadKey, into: Temporaries | None = None) -> bool:
        """Remove a chunk's file or make it a spare in ``into``; return false if it is missing."""
        with absence_ignored(), self._shard(key) as shard_fd:
            name = _file_name(key)
            if into is None or not into.adopt(name, shard_fd):
                os.unlink(name, dir_fd=shard_fd)
            return True
        return False

    def list_shard(self, shard: str) -> list[StoredChunk]:
        """Return the chunks of one shard in any order; skip foreign files."""
        chunks = []
        with (
            absence_ignored(),
            ClosingFd(self._directories.open(shard, self._fd)) as shard_fd,
            os.scandir(shard_fd) as entries,
        ):
            for entry in entries:
                key = _key_of(entry.name)
                if key is None or shard_of(key) != shard:
                    continue
                with suppress(FileNotFoundError):  # removed since it was listed
                    stored = self._stored(key, entry.stat(follow_symlinks=False))
                    if stored is not None:
                        chunks.append(stored)
        return chunks

    def read_manifest(self) -> bytes | None:
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK
            with ClosingFd(open_file(_MANIFEST, flags, self._fd)) as fd:
                return os.read(fd, StoredNamespace.MOST_BYTES)
        except OSError:
            return None

    def write_manifest(self, text: str) -> None:
        """Write the manifest if it is missing."""
        try:
            os.stat(_MANIFEST, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            temporary = self.temporaries.write([memoryview(text.encode())])
            self.temporaries.rename(temporary, _MANIFEST, self._fd)
            if self._directories.sync:
                os.fsync(self._fd)

    def _make_shard(self, key: OffloadKey) -> None:
        if shard_of(key) not in self._shards:
            with self._shard(key, create=True):
                pass

    def _shard(self, key: OffloadKey, *, create: bool = False) -> ClosingFd:
        shard = shard_of(key)
        fd = self._directories.open(shard, self._fd, create=create)
        self._shards.add(shard)
        return ClosingFd(fd)

    def _open(self, name: str, shard_fd: int) -> int:
        """Open a chunk's file. ``O_NOATIME`` keeps the access time: when the chunk was stored."""
        # Without O_NONBLOCK, opening a pipe of this name would block.
        flags = os.O_RDONLY | os.O_NONBLOCK
        with suppress(PermissionError):  # O_NOATIME is refused for another user's file
            return open_file(name, flags | os.O_NOATIME, shard_fd, direct=self._direct)
        return open_file(name, flags, shard_fd, direct=self._direct)

    def _stored(self, key: OffloadKey, status: os.stat_result) -> StoredChunk | None:
        if not stat.S_ISREG(status.st_mode):
            return None
        return StoredChunk(self.fingerprint, key, status.st_size, self.lifetime.used_ns(status))

    def _times(self, status: os.stat_result, used_ns: int) -> tuple[int, int]:
        return status.st_atime_ns, next_use_ns(self.lifetime.used_ns(status), used_ns)


# Cache shard and file names, because a store or a load uses each name up to four times.
@lru_cache(maxsize=4096)
def shard_of(key: OffloadKey) -> str:
    """Return the name of a key's shard. A hash spreads sequential keys evenly over the shards."""
    return hashlib.blake2b(key, digest_size=1).hexdigest()


@lru_cache(maxsize=4096)
def _file_name(key: OffloadKey) -> str:
    return key.hex() + _SUFFIX


def _key_of(file_name: str) -> OffloadKey | None:
    try:
        key = bytes.fromhex(file_name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    # Compare the names, because fromhex also accepts capitals and spaces.
    return key if _file_name(key) == file_name else None
