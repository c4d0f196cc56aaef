"""Opens the root directory and its namespaces, and probes its file system."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from kvtier_file.chunks import MOST_AHEAD_NS, ChunkId, Lifetime, StoredChunk
from kvtier_file.config import FileTierConfig
from kvtier_file.directories import ClosingFd, Directories
from kvtier_file.errors import FULL
from kvtier_file.file_io import ALIGNMENT
from kvtier_file.namespace import SHARDS, NamespaceDirectory
from kvtier_file.shared_files import SHARED
from kvtier_file.temporaries import Temporaries
from kvtier_sdk import ConfigError, StoredNamespace, TierContext, format_bytes


class Root:
    """The root directory, where the tier owns one namespace. Methods block and are thread-safe."""

    def __init__(self, config: FileTierConfig, context: TierContext, names: Iterator[str]) -> None:
        self._config = config
        self._context = context
        self._fingerprint = context.namespace.fingerprint
        self._names = names
        self._lengths = range(context.header_bytes + ALIGNMENT, context.object_bytes + 1, ALIGNMENT)
        # Try O_DIRECT even before the probe: if it fails, reads fall back to the page cache.
        self._direct = config.direct_io != "off"
        self._fd: int | None = None
        self._remake_lock = threading.Lock()
        self._is_short = False
        self.directories = Directories(config, context.logger)
        self.is_closing = False  # true makes a running scan fail

    @property
    def fd(self) -> int:
        """The root's descriptor. A removed root is recreated, but its parents are not."""
        fd = self._fd
        if fd is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if os.fstat(fd).st_nlink == 0:
            with self._remake_lock:
                if os.fstat(fd).st_nlink == 0:
                    self._remake(fd)
        return fd

    def open(self, *, create: bool = True) -> None:
        self.is_closing = False
        try:
            self._fd = self.directories.open_root(self._config.root)
        except FileNotFoundError:
            if not create:
                raise
            os.makedirs(self._config.root, 0o700, exist_ok=True)
            self._fd = self.directories.open_root(self._config.root)
        # Refuse untrusted directories now, before the engine starts.
        for name in (self._fingerprint, SHARED):
            with suppress(FileNotFoundError), ClosingFd(self.directories.open(name, self._fd)):
                pass

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextmanager
    def namespace(
        self, fingerprint: str | None = None, *, create: bool = True
    ) -> Iterator[NamespaceDirectory]:
        """Open a namespace's directory and yield it. The default is the tier's own namespace."""
        # Open the directory in each call, because it may have been removed and must be recreated.
        fingerprint = fingerprint or self._fingerprint
        with ClosingFd(self.directories.open(fingerprint, self.fd, create=create)) as fd:
            directory = NamespaceDirectory(
                fingerprint,
                fd,
                self._names,
                self.directories,
                self.lifetime(),
                self._lengths,
                direct=self._direct,
            )
            with closing(directory.temporaries):
                yield directory

    def lifetime(self) -> Lifetime:
        now_ns = int(self._context.clock.wall_s() * 1e9)

        def before(time_s: float | None) -> int:
            return 0 if time_s is None else now_ns - int(time_s * 1e9)

        config = self._config
        return Lifetime(now_ns + MOST_AHEAD_NS, before(config.expiry_s), before(config.max_age_s))

    def prepare(self, manifest: str) -> bool:
        """Create the tier's namespace, and probe O_DIRECT; return false on a full file system."""
        try:
            with self.namespace() as directory:
                directory.temporaries.probe(direct=False)
                self._direct = self._choose_direct(directory)
                self._check_times(directory)
                directory.write_manifest(manifest)
        except OSError as error:
            # Chunks on a full file system can still be loaded, and evictions may make room.
            if error.errno not in FULL:
                raise
            return False
        return True

    def headroom_bytes(self) -> int | None:
        """Return how many more bytes ``min_free`` lets the tier write; ``None`` for no limit."""
        # Until a written file has its final name, its bytes count twice: as used space and as a
        # reservation. So evictions may free more than needed, by up to the reserved bytes.
        if not self._config.min_free:
            return None
        size_bytes, free_bytes = self._room()
        min_free = self._min_free_bytes(size_bytes)
        if free_bytes < min_free and not self._is_short:
            self._is_short = True
            self._context.logger.warning(
                "the file system of tier root '%s' has %s free, and min_free keeps %s: chunks are "
                "evicted for that, whatever the capacity; make room, or lower min_free",
                self._config.root,
                format_bytes(free_bytes),
                format_bytes(min_free),
            )
        elif free_bytes > 2 * min_free:
            self._is_short = False
        return free_bytes - min_free

    def free_bytes(self) -> int:
        return self._room()[1]

    def _room(self) -> tuple[int, int]:
        """Return the file system's size and free space in bytes."""
        status = os.fstatvfs(self.fd)
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def _min_free_bytes(self, size_bytes: int) -> int:
        min_free = self._config.min_free
        return int(min_free * size_bytes) if isinstance(min_free, float) else min_free

    def check_capacity(self) -> None:
        capacity_bytes = self._config.capacity_bytes
        size_bytes, _ = self._room()
        if capacity_bytes is not None and 0 < size_bytes < capacity_bytes:
            raise ConfigError(
                f"capacity {format_bytes(capacity_bytes)} is more than the whole file system of "
                f"tier root '{self._config.root}', {format_bytes(size_bytes)}; write at most "
                # Round down to MiB, because the rounded-up size might not fit.
                f"capacity: '{max(0, size_bytes - self._min_free_bytes(size_bytes)) >> 20}MiB', "
                "which leaves what min_free keeps, or choose another root"
            )

    def scan(self) -> Iterator[StoredChunk]:
        # An engine cannot load files of the wrong length, so it removes them in its own namespace.
        own = None if self._context.maintenance else self._fingerprint
        for directory in self.namespaces():
            for shard in SHARDS:
                if self.is_closing:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                for stored in directory.list_shard(shard):
                    if stored.fingerprint == own and stored.size_bytes not in self._lengths:
                        directory.remove(stored.key)
                    else:
                        yield stored

    def remove(self, chunk_id: ChunkId, into: Temporaries | None = None) -> None:
        """Remove a chunk of any namespace. A missing chunk is ignored."""
        with (
            suppress(FileNotFoundError),
            self.namespace(chunk_id.fingerprint, create=False) as directory,
        ):
            directory.remove(chunk_id.key, into)

    def last_used_ns(self, chunk_id: ChunkId) -> int | None:
        """Return the time of a chunk's last use by any process, or ``None`` if it is unknown."""
        with suppress(OSError), self.namespace(chunk_id.fingerprint, create=False) as directory:
            stored = directory.find(chunk_id.key)
            return stored and stored.used_ns
        return None

    def namespaces(self) -> Iterator[NamespaceDirectory]:
        """Open and yield each namespace. Skip foreign files and namespaces that no longer exist."""
        for name in os.listdir(self.fd):
            if StoredNamespace.is_fingerprint(name):
                with (
                    suppress(FileNotFoundError, NotADirectoryError),
                    self.namespace(name, create=False) as directory,
                ):
                    yield directory

    def _remake(self, lost_fd: int) -> None:
        # Create no parents: if a parent is missing, the intended file system may be unmounted.
        with suppress(FileExistsError):
            os.mkdir(self._config.root, 0o700)
        with ClosingFd(self.directories.open_root(self._config.root)) as fd:
            # Keep the descriptor's number, because other threads use it.
            os.dup2(fd, lost_fd, inheritable=False)
        self._context.logger.warning(
            "tier root '%s' was removed, and its chunks with it; it is used anew", self._config.root
        )

    def _check_times(self, directory: NamespaceDirectory) -> None:
        used_ns = directory.lifetime.latest_ns
        if self._config.max_age_s is not None and not directory.temporaries.keeps_times(used_ns):
            raise ConfigError(
                f"the file system of tier root '{self._config.root}' does not keep a file's times "
                "to the nanosecond, which max_age needs; leave max_age out and write ttl, or "
                "choose another root"
            )

    def _choose_direct(self, directory: NamespaceDirectory) -> bool:
        choice = self._config.direct_io
        if choice == "off":
            return False
        reason = os.strerror(errno.EINVAL)
        try:
            if directory.temporaries.probe(direct=True):
                return True
        except OSError as error:
            if error.errno in FULL:
                raise
            reason = os.strerror(error.errno or errno.EIO)
        refusal = (
            f"the file system of tier root '{self._config.root}' does not support O_DIRECT: "
            f"{reason}"
        )
        if choice == "on":
            raise ConfigError(f"{refusal}; write direct_io: 'auto' or 'off'")
        self._context.logger.info("%s; using the page cache", refusal)
        return False
