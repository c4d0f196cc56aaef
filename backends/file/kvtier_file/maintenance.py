"""Lets a tool read and delete the chunks under a root while engines use the root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kvtier_file.errors import tier_error
from kvtier_file.namespace import SHARDS, NamespaceDirectory
from kvtier_file.store import ChunkStore, Verdicts, entry_of
from kvtier_sdk import (
    ChunkNotFoundError,
    ConfigError,
    Entry,
    OffloadKey,
    TierError,
    Transfer,
    Usage,
)


class Maintenance(ChunkStore):
    """A view of the chunks on disk. Only :meth:`delete` changes files or opens the shared files."""

    def open(self) -> None:
        self._is_open = True
        try:
            self._root.open(create=False)
        except FileNotFoundError:
            raise ConfigError(f"there is no directory '{self._config.root}'") from None
        except OSError as error:
            raise tier_error(error, self._config.root, "readable") from error

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        faults: Verdicts = {}
        hits = []
        with self._existing() as directory:
            for key in keys:
                found = None
                with self._fault(key, faults, "readable"):
                    found = None if directory is None else directory.find(key)
                hits.append(directory is not None and self._is_loadable(found, directory))
        if faults and len(faults) == len(keys):
            raise faults[keys[0]]
        return hits

    def load(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        """Read a batch without recording uses; return an error or ``None`` for each chunk."""
        verdicts: Verdicts = {}
        with self._existing() as directory:
            for transfer in batch:
                key = transfer.key
                with self._verdict(key, verdicts, "readable", at_file=True):
                    if directory is None:
                        raise ChunkNotFoundError("no such chunk")
                    directory.read(transfer, None)
        return [verdicts.get(transfer.key) for transfer in batch]

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks, but do not create a missing namespace."""
        with self._existing() as directory:
            if directory is not None:
                super().delete(keys)

    def list_shard(self, shard: str) -> list[Entry]:
        """Return the chunks of one shard, including chunks that no engine can load."""
        with self._existing() as directory:
            return [entry_of(stored) for stored in directory.list_shard(shard)] if directory else []

    def usage(self) -> Usage:
        """Return the usage of all namespaces under the root, counted on disk."""
        with self._translating("readable"), self._call():
            lengths = [
                stored.size_bytes
                for directory in self._root.namespaces()
                for shard in SHARDS
                for stored in directory.list_shard(shard)
            ]
            free_bytes = self._root.free_bytes()
        return Usage(len(lengths), sum(lengths), self._config.capacity_bytes, free_bytes)

    @contextmanager
    def _existing(self) -> Iterator[NamespaceDirectory | None]:
        with self._translating("readable"), self._call(), ExitStack() as opened:
            directory = None
            with suppress(FileNotFoundError):
                directory = opened.enter_context(self._root.namespace(create=False))
            yield directory
