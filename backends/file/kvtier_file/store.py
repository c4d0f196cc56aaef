"""The chunks under one root: what is on disk and what is counted, kept in agreement."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from kvtier_file.budget import Budget, Chunk
from kvtier_file.config import FileTierConfig
from kvtier_file.failures import FULL, open_error, tier_error
from kvtier_file.objects import SHARDS, NamespaceDirectory, StoredChunk, opened_directory
from kvtier_file.temporaries import TemporaryNames
from kvtier_sdk import (
    ChunkNotFoundError,
    ConfigError,
    Entry,
    OffloadKey,
    TierContext,
    TierError,
    Transfer,
    Usage,
)


class ChunkStore:
    """Chunks as files, within a budget. Every method blocks; callable from several threads.

    The lock makes one step of each change to the disk and its count: a rename with the commit, an
    unlink with the forgetting. Nothing slower is done under it: data is written before, under a
    reservation.

    Args:
        config: the tier's options.
        context: the tier's surroundings.
    """

    def __init__(self, config: FileTierConfig, context: TierContext) -> None:
        self._config = config
        self._context = context
        self._fingerprint = context.namespace.fingerprint
        self._object_bytes = context.object_bytes
        self._temporaries = TemporaryNames()
        self._budget = Budget(config.capacity_bytes)
        self._lock = threading.Lock()
        self._root_fd: int | None = None
        self._direct = False

    def open(self) -> None:
        """Make what is missing, check that it can be used, sweep, and count what is there.

        Raises:
            ConfigError: the root cannot be used, or not in the way that was asked for.
            TierError: the file system fails.
        """
        root = self._config.root
        try:
            self._root_fd = self._open_root()
            with self._namespace() as directory:
                self._check_writable(directory)
                self._direct = self._choose_direct(directory)
                directory.write_manifest(self._context.namespace.manifest_json())
            self._count_others()
            self._count_own()
            with self._lock:
                self._evict(0, None)
        except OSError as error:
            raise open_error(error, root) from error

    def close(self) -> None:
        """Let go of the root. Nothing is under way any more."""
        if self._root_fd is not None:
            os.close(self._root_fd)
            self._root_fd = None

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Say which chunks are on disk, whoever put them there.

        A file of the wrong length can never be loaded: it is none, and is removed.

        Raises:
            TierError: the file system fails.
        """
        with self._reading(), self._namespace() as directory:
            return [self._contains_one(directory, key) for key in keys]

    def store(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        """Write a batch, each transfer with a verdict of its own.

        Raises:
            TierError: the namespace's directory cannot be opened.
        """
        return self._each("writable", self._store_one, batch)

    def load(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        """Read a batch, each transfer with a verdict of its own.

        Raises:
            TierError: the namespace's directory cannot be opened.
        """
        return self._each("readable", self._load_one, batch)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks; one that resists does not spare the others.

        Raises:
            TierError: some are still there.
        """
        removed = []
        failure: OSError | None = None
        with self._writing(), self._namespace() as directory:
            for key in keys:
                try:
                    with self._lock:
                        was_there = directory.remove(key)
                        was_known = self._budget.forget(self._chunk(key))
                except OSError as error:
                    failure = error
                    continue
                if was_there or was_known:
                    removed.append(key)
            self._report(removed)
            if failure is not None:
                raise failure

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count chunks as used just now, the last as the most recently used.

        Raises:
            TierError: the file system fails.
        """
        now_ns = self._now_ns()
        with self._writing(), self._namespace() as directory:
            for order, key in enumerate(keys):
                if directory.touch(key, now_ns + order):
                    self._count_use(directory, key)

    def list_shard(self, shard: str) -> list[Entry]:
        """The loadable chunks of one shard of this namespace.

        Raises:
            TierError: the file system fails.
        """
        with self._reading(), self._namespace() as directory:
            return [
                Entry(stored.key, stored.size_bytes)
                for stored in directory.list_shard(shard)
                if stored.size_bytes == self._object_bytes
            ]

    def usage(self) -> Usage:
        """What is stored, of all namespaces under the root."""
        with self._lock:
            return Usage(len(self._budget), self._budget.used_bytes, self._config.capacity_bytes)

    # One transfer or key.

    def _contains_one(self, directory: NamespaceDirectory, key: OffloadKey) -> bool:
        size_bytes = directory.size(key)
        if size_bytes == self._object_bytes:
            return True
        # A miss is the common case and must not wait for the lock; 'in' needs none.
        if size_bytes is not None or self._chunk(key) in self._budget:
            self._drop_unusable(directory, key)
        return False

    def _store_one(self, directory: NamespaceDirectory, transfer: Transfer, used_ns: int) -> None:
        key = transfer.key
        # A file of the right length is taken for the chunk: one that is damaged inside is deleted
        # by the SDK when a load finds out, and stored anew.
        if directory.size(key) == transfer.object_bytes and directory.touch(key, used_ns):
            self._count_use(directory, key)
            return
        ticket = self._reserve(transfer.object_bytes)
        try:
            committing = self._committing(ticket, self._chunk(key))
            directory.write(key, transfer.buffers, used_ns, committing)
        finally:
            with self._lock:
                self._budget.release(ticket)

    def _load_one(self, directory: NamespaceDirectory, transfer: Transfer, used_ns: int) -> None:
        try:
            directory.read(transfer.key, transfer.buffers, used_ns)
        except ChunkNotFoundError:
            self._drop_unusable(directory, transfer.key)
            raise
        self._count_use(directory, transfer.key)

    def _each(
        self,
        ability: str,
        act: Callable[[NamespaceDirectory, Transfer, int], None],
        batch: Sequence[Transfer],
    ) -> list[TierError | None]:
        """Do one thing with each transfer; none of the batch is evicted until all are through."""
        verdicts: list[TierError | None] = []
        now_ns = self._now_ns()
        chunks = [self._chunk(transfer.key) for transfer in batch]
        with self._lock:
            self._budget.pin(chunks)
        try:
            with self._translating(ability), self._namespace() as directory:
                for order, transfer in enumerate(batch):
                    try:
                        with self._translating(ability):
                            act(directory, transfer, now_ns + order)
                        verdicts.append(None)
                    except TierError as error:
                        verdicts.append(error)
        finally:
            with self._lock:
                self._budget.unpin(chunks)
        return verdicts

    # Keeping count. What is done under the lock looks at the disk again.

    def _count_use(self, directory: NamespaceDirectory, key: OffloadKey) -> None:
        with self._lock:
            # One that is not known was put there by somebody else.
            if (
                not self._budget.touch(self._chunk(key))
                and directory.size(key) == self._object_bytes
            ):
                self._budget.add(self._chunk(key), self._object_bytes)

    def _drop_unusable(self, directory: NamespaceDirectory, key: OffloadKey) -> None:
        with self._lock:
            size_bytes = directory.size(key)
            if size_bytes == self._object_bytes:
                return
            if size_bytes is not None:
                directory.remove(key)
            if self._budget.forget(self._chunk(key)):
                self._report([key])

    @contextmanager
    def _committing(self, ticket: int, chunk: Chunk) -> Iterator[None]:
        with self._lock:
            yield
            self._budget.commit(ticket, chunk)

    def _reserve(self, size_bytes: int) -> int:
        headroom_bytes = self._headroom_bytes()
        with self._lock:
            self._evict(size_bytes, headroom_bytes)
            return self._budget.reserve(size_bytes)

    def _evict(self, need_bytes: int, headroom_bytes: int | None) -> None:
        """Make room. The lock is held, so that nobody else takes it first."""
        removed = []
        try:
            for chunk in self._budget.victims(need_bytes, headroom_bytes):
                try:
                    self._unlink(chunk)
                except OSError:
                    # The next store tries others first.
                    self._budget.touch(chunk)
                    raise
                self._budget.forget(chunk)
                if chunk.fingerprint == self._fingerprint:
                    removed.append(chunk.key)
        finally:
            self._report(removed)

    def _unlink(self, chunk: Chunk) -> None:
        try:
            with self._namespace(chunk.fingerprint, create=False) as directory:
                directory.remove(chunk.key)
        except FileNotFoundError:
            return  # the whole namespace is gone

    def _headroom_bytes(self) -> int | None:
        """What may be written before ``min_free`` is touched; ``None`` where it is off."""
        min_free = self._config.min_free
        if not min_free:
            return None
        status = os.fstatvfs(self._open_fd())
        if isinstance(min_free, float):
            min_free = int(min_free * status.f_blocks * status.f_frsize)
        return int(status.f_bavail * status.f_frsize) - int(min_free)

    # Opening.

    def _open_root(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return os.open(self._config.root, flags)
        except FileNotFoundError:
            os.makedirs(self._config.root, 0o700, exist_ok=True)
            return os.open(self._config.root, flags)

    def _check_writable(self, directory: NamespaceDirectory) -> None:
        try:
            directory.probe(direct=False)
        except OSError as error:
            # What is stored in a full file system can still be loaded.
            if error.errno not in FULL:
                raise

    def _choose_direct(self, directory: NamespaceDirectory) -> bool:
        choice = self._config.direct_io
        if choice == "off":
            return False
        reason = os.strerror(errno.EINVAL)
        try:
            if directory.probe(direct=True):
                return True
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
        sentence = f"the file system of tier root '{self._config.root}' takes no O_DIRECT: {reason}"
        if choice == "on":
            raise ConfigError(f"{sentence}; write direct_io: 'auto' or 'off'")
        self._context.logger.info("%s; using the page cache", sentence)
        return False

    def _count_others(self) -> None:
        """Count other namespaces' chunks: they are used less recently than any of ours."""
        fingerprints = [
            name
            for name in os.listdir(self._open_fd())
            if name != self._fingerprint and _looks_like(name, self._fingerprint)
        ]
        found = []
        for fingerprint in fingerprints:
            try:
                with self._namespace(fingerprint, create=False) as directory:
                    directory.sweep_temporaries()
                    found += [(stored, fingerprint) for stored in _all_chunks(directory)]
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed since it was listed, or none of ours
        for stored, fingerprint in sorted(found, key=lambda pair: pair[0].used_ns):
            self._budget.add(Chunk(fingerprint, stored.key), stored.size_bytes)

    def _count_own(self) -> None:
        with self._namespace() as directory:
            directory.sweep_temporaries()
            for stored in sorted(_all_chunks(directory), key=lambda stored: stored.used_ns):
                if stored.size_bytes == self._object_bytes:
                    self._budget.add(self._chunk(stored.key), stored.size_bytes)
                else:
                    directory.remove(stored.key)

    # Small things.

    @contextmanager
    def _namespace(
        self, fingerprint: str | None = None, *, create: bool = True
    ) -> Iterator[NamespaceDirectory]:
        """A namespace's directory, this tier's by default.

        It is opened anew each time, so that one that was removed by hand is made again.
        """
        name = fingerprint or self._fingerprint
        sync = self._config.fsync
        with opened_directory(name, self._open_fd(), create=create, sync=sync) as fd:
            yield NamespaceDirectory(fd, self._temporaries, direct=self._direct, sync=sync)

    @contextmanager
    def _translating(self, ability: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise tier_error(error, self._config.root, ability) from error

    def _reading(self) -> AbstractContextManager[None]:
        return self._translating("readable")

    def _writing(self) -> AbstractContextManager[None]:
        return self._translating("writable")

    def _open_fd(self) -> int:
        if self._root_fd is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._root_fd

    def _chunk(self, key: OffloadKey) -> Chunk:
        return Chunk(self._fingerprint, key)

    def _now_ns(self) -> int:
        return int(self._context.clock.wall_s() * 1e9)

    def _report(self, removed: Sequence[OffloadKey]) -> None:
        if removed:
            self._context.report_removed(removed)


def _all_chunks(directory: NamespaceDirectory) -> list[StoredChunk]:
    return [stored for shard in SHARDS for stored in directory.list_shard(shard)]


def _looks_like(name: str, fingerprint: str) -> bool:
    return len(name) == len(fingerprint) and not name.strip("0123456789abcdef")
