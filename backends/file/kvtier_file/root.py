"""The directory that a tier was given: its namespaces, and what its file system can do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from logging import Logger, LoggerAdapter

from kvtier_file.budget import Chunk, Counted
from kvtier_file.config import FileTierConfig
from kvtier_file.directories import opened_directory
from kvtier_file.failures import FULL
from kvtier_file.leases import TemporaryNames
from kvtier_file.objects import SHARDS, NamespaceDirectory, StoredChunk
from kvtier_sdk import ConfigError

_FLAGS = os.O_RDONLY | os.O_DIRECTORY


class Root:
    """A root and one namespace in it that is the tier's own. Callable from any thread; blocks.

    Args:
        config: the tier's options.
        fingerprint: the own namespace's.
        temporaries: where names of temporaries come from.
    """

    def __init__(
        self, config: FileTierConfig, fingerprint: str, temporaries: TemporaryNames
    ) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._temporaries = temporaries
        # Until that is found out: a file that takes no O_DIRECT falls back by itself.
        self._direct = config.direct_io != "off"
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """Its descriptor. A directory that was removed by hand is made again, but not its parents.

        Raises:
            OSError: it is not open, or cannot be made again.
        """
        if self._fd is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if os.fstat(self._fd).st_nlink == 0:
            # Without a parent, the file system that was meant may be gone too.
            with suppress(FileExistsError):
                os.mkdir(self._config.root, 0o700)
            fd = os.open(self._config.root, _FLAGS)
            try:
                # The number stays, for other threads are using it.
                os.dup2(fd, self._fd, inheritable=False)
            finally:
                os.close(fd)
        return self._fd

    def open(self) -> None:
        """Open the directory; make it where it is missing.

        Raises:
            OSError: that cannot be done.
        """
        try:
            self._fd = os.open(self._config.root, _FLAGS)
        except FileNotFoundError:
            os.makedirs(self._config.root, 0o700, exist_ok=True)
            self._fd = os.open(self._config.root, _FLAGS)

    def close(self) -> None:
        """Let go of the directory, if it is open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextmanager
    def namespace(
        self, fingerprint: str | None = None, *, create: bool = True
    ) -> Iterator[NamespaceDirectory]:
        """A namespace's directory, the tier's own by default.

        It is opened anew each time, so that one that was removed by hand is made again.
        """
        name = fingerprint or self._fingerprint
        sync = self._config.fsync
        with opened_directory(name, self.fd, create=create, sync=sync) as fd:
            directory = NamespaceDirectory(fd, self._temporaries, direct=self._direct, sync=sync)
            with closing(directory):
                yield directory

    def prepare(self, manifest: str, logger: Logger | LoggerAdapter[Logger]) -> None:
        """Make the own namespace, check that it can be written, and find out how.

        In a full file system nothing is found out, and what is missing comes with the stores.

        Args:
            manifest: what the namespace stands for.
            logger: told where O_DIRECT does not work.

        Raises:
            ConfigError: it cannot be used in the way that was asked for.
            OSError: it cannot be written.
        """
        try:
            with self.namespace() as directory:
                directory.probe(direct=False)
                self._direct = self._choose_direct(directory, logger)
                directory.write_manifest(manifest)
        except OSError as error:
            # What is stored in a full file system can still be loaded, and room may be made.
            if error.errno not in FULL:
                raise

    def headroom_bytes(self) -> int | None:
        """What may be written before ``min_free`` is touched; ``None`` where it is off.

        What writes under way have written is missing here, and reserved until they are placed. It
        counts twice, so that more stays free than ``min_free``: at most what is under way.
        """
        min_free = self._config.min_free
        if not min_free:
            return None
        status = os.fstatvfs(self.fd)
        if isinstance(min_free, float):
            min_free = int(min_free * status.f_blocks * status.f_frsize)
        return int(status.f_bavail * status.f_frsize) - int(min_free)

    def sweep(self, fingerprint: str, is_held: Callable[[str], bool]) -> None:
        """Remove the temporaries in a namespace whose leases are not held.

        Raises:
            OSError: some of them are still there.
        """
        with (
            suppress(FileNotFoundError, NotADirectoryError),  # gone, or none of ours
            self.namespace(fingerprint, create=False) as directory,
        ):
            directory.sweep_temporaries(is_held)

    def sweep_all(self, is_held: Callable[[str], bool]) -> None:
        """:meth:`sweep` each namespace."""
        for fingerprint in self._fingerprints():
            self.sweep(fingerprint, is_held)

    def count(self, object_bytes: int) -> list[Counted]:
        """Look up what is stored in all namespaces.

        Args:
            object_bytes: length of the own namespace's files; others are of no use there, and
                are removed.

        Raises:
            OSError: it cannot be found out.
        """
        counted = []
        for fingerprint in self._fingerprints():
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                self.namespace(fingerprint, create=False) as directory,
            ):
                for stored in _all_chunks(directory):
                    if fingerprint == self._fingerprint and stored.size_bytes != object_bytes:
                        directory.remove(stored.key)
                    else:
                        chunk = Chunk(fingerprint, stored.key)
                        counted.append(Counted(chunk, stored.size_bytes, stored.used_ns))
        return counted

    def unlink(self, chunk: Chunk) -> None:
        """Remove a chunk of whichever namespace; one that is gone already is none the less."""
        with (
            suppress(FileNotFoundError),
            self.namespace(chunk.fingerprint, create=False) as directory,
        ):
            directory.remove(chunk.key)

    def last_used_ns(self, chunk: Chunk) -> int | None:
        """When a chunk was last used, whoever used it; ``None`` where that is not known."""
        with (
            suppress(OSError),
            self.namespace(chunk.fingerprint, create=False) as directory,
        ):
            return directory.used_ns(chunk.key)
        return None

    def _fingerprints(self) -> list[str]:
        length = len(self._fingerprint)
        return [
            name
            for name in os.listdir(self.fd)
            if len(name) == length and not name.strip("0123456789abcdef")
        ]

    def _choose_direct(
        self, directory: NamespaceDirectory, logger: Logger | LoggerAdapter[Logger]
    ) -> bool:
        choice = self._config.direct_io
        if choice == "off":
            return False
        reason = os.strerror(errno.EINVAL)
        try:
            if directory.probe(direct=True):
                return True
        except OSError as error:
            if error.errno in FULL:
                raise
            reason = os.strerror(error.errno or errno.EIO)
        sentence = f"the file system of tier root '{self._config.root}' takes no O_DIRECT: {reason}"
        if choice == "on":
            raise ConfigError(f"{sentence}; write direct_io: 'auto' or 'off'")
        logger.info("%s; using the page cache", sentence)
        return False


def _all_chunks(directory: NamespaceDirectory) -> list[StoredChunk]:
    return [stored for shard in SHARDS for stored in directory.list_shard(shard)]
