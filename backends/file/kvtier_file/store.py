"""The chunks under one root: what is on disk and what is counted, kept in agreement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from kvtier_file.account import Account
from kvtier_file.budget import Chunk, Counted
from kvtier_file.config import FileTierConfig
from kvtier_file.failures import open_error, tier_error
from kvtier_file.leases import TemporaryNames, new_lease
from kvtier_file.objects import NamespaceDirectory
from kvtier_file.pins import Pins
from kvtier_file.root import Root
from kvtier_file.times import UseTimes
from kvtier_sdk import (
    ChunkNotFoundError,
    Entry,
    OffloadKey,
    TierCapacityError,
    TierContext,
    TierError,
    Transfer,
    Usage,
)

Verdicts = dict[OffloadKey, TierError]

# What is reserved can be neither used nor evicted, so that a step of a batch may reserve no more
# than this share of a small capacity; with a usual one, a batch is one step.
_SHARES = 64
_MANY_BYTES = 2**50


class ChunkStore:
    """Chunks as files, within a budget. Every method blocks; callable from several threads.

    A section of the account makes one step of each change to the disk and its count: a rename
    with the adding, an unlink with the forgetting. Nothing slower is done in it, and a batch
    needs two: data is written between them, under a reservation. Loads need none.

    Args:
        config: the tier's options.
        context: the tier's surroundings.
    """

    def __init__(self, config: FileTierConfig, context: TierContext) -> None:
        self._config = config
        self._context = context
        self._fingerprint = context.namespace.fingerprint
        self._manifest = context.namespace.manifest_json()
        self._object_bytes = context.object_bytes
        capacity_bytes = config.capacity_bytes or _MANY_BYTES
        self._step_chunks = max(1, capacity_bytes // (_SHARES * self._object_bytes))
        self._pins = Pins()
        lease = new_lease()
        self._root = Root(config, self._fingerprint, TemporaryNames(lease))
        self._account = Account(
            lease,
            self._fingerprint,
            config.capacity_bytes,
            root_fd=lambda: self._root.fd,
            count=lambda: self._root.count(self._object_bytes),
            sweep=self._root.sweep,
            report=context.report_removed,
        )
        self._times = UseTimes(context.clock, self._account.latest_ns)

    def open(self) -> None:
        """Sweep, count what is there, make what is missing, and check that it can be used.

        Raises:
            ConfigError: the root cannot be used, or not in the way that was asked for.
            TierError: the file system fails.
        """
        try:
            self._root.open()
            self._account.open()
            self._root.sweep_all(self._account.is_held)
            with (
                self._account.section(),
                # Where others, with a larger capacity, are writing more, the stores will see.
                suppress(TierCapacityError),
            ):
                # Before a directory is made: in a full file system even that needs room.
                self._make_room(0, self._root.headroom_bytes())
            self._root.prepare(self._manifest, self._context.logger)
        except OSError as error:
            self.close()
            raise open_error(error, self._config.root) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the root. Nothing is under way any more."""
        self._account.close()
        self._root.close()

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Say which chunks are on disk, whoever put them there.

        A file of the wrong length can never be loaded: it is none, and is removed.

        Raises:
            TierError: the file system fails.
        """
        with self._reading(), self._root.namespace() as directory:
            sizes = [directory.size(key) for key in keys]
            # A miss is the common case and must not wait for a section.
            self._reconcile(
                directory,
                [
                    key
                    for key, size_bytes in zip(keys, sizes, strict=True)
                    if size_bytes != self._object_bytes
                    and (size_bytes is not None or self._chunk(key) in self._account)
                ],
            )
        return [size_bytes == self._object_bytes for size_bytes in sizes]

    def store(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        """Write a batch, each transfer with a verdict of its own.

        Raises:
            TierError: the account cannot be kept.
        """
        verdicts: Verdicts = {}
        with self._moving(batch), self._writing(), self._root.namespace() as directory:
            missing = list(self._missing(directory, batch, verdicts).items())
            for start in range(0, len(missing), self._step_chunks):
                part = missing[start : start + self._step_chunks]
                self._write(directory, dict(part), verdicts)
        return [verdicts.get(transfer.key) for transfer in batch]

    def load(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        """Read a batch, each transfer with a verdict of its own.

        Raises:
            TierError: the namespace's directory cannot be opened.
        """
        verdicts: Verdicts = {}
        surprising = []
        times_ns = self._times.take(len(batch))
        with self._moving(batch), self._reading(), self._root.namespace() as directory:
            for transfer, used_ns in zip(batch, times_ns, strict=True):
                key = transfer.key
                with self._judged(key, verdicts, "readable"):
                    directory.read(key, transfer.buffers, used_ns)
                was_there = not isinstance(verdicts.get(key), ChunkNotFoundError)
                if was_there != (self._chunk(key) in self._account):
                    surprising.append(key)
            with suppress(OSError):  # the bytes are here; that they are counted matters less
                self._reconcile(directory, surprising)
        return [verdicts.get(transfer.key) for transfer in batch]

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks; one that resists does not spare the others.

        Raises:
            TierError: some are still there.
        """
        failure: OSError | None = None
        with self._writing(), self._root.namespace() as directory:
            with self._account.section():
                self._account.changing()
                for key in keys:
                    try:
                        was_there = directory.remove(key)
                    except OSError as error:
                        failure = error
                        continue
                    if was_there or self._chunk(key) in self._account:
                        self._account.forget(self._chunk(key))
            if failure is not None:
                raise failure

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count chunks as used just now, the last as the most recently used.

        Raises:
            TierError: the file system fails.
        """
        times_ns = self._times.take(len(keys))
        with self._writing(), self._root.namespace() as directory:
            for key, used_ns in zip(keys, times_ns, strict=True):
                directory.touch(key, used_ns)

    def list_shard(self, shard: str) -> list[Entry]:
        """The loadable chunks of one shard of this namespace.

        Raises:
            TierError: the file system fails.
        """
        with self._reading(), self._root.namespace() as directory:
            return [
                Entry(stored.key, stored.size_bytes)
                for stored in directory.list_shard(shard)
                if stored.size_bytes == self._object_bytes
            ]

    def usage(self) -> Usage:
        """What is stored, of all namespaces under the root, by all processes.

        Raises:
            TierError: the account cannot be read.
        """
        with self._reading(), self._account.section():
            account = self._account
            return Usage(account.chunks, account.used_bytes, self._config.capacity_bytes)

    # The steps of a store.

    def _missing(
        self, directory: NamespaceDirectory, batch: Sequence[Transfer], verdicts: Verdicts
    ) -> dict[OffloadKey, Transfer]:
        """What must be written; the rest is noted as used."""
        missing = {}
        unknown = []
        for transfer, used_ns in zip(batch, self._times.take(len(batch)), strict=True):
            key = transfer.key
            with self._judged(key, verdicts, "writable"):
                # A file of the right length is taken for the chunk: one that is damaged inside is
                # deleted by the SDK when a load finds out, and stored anew.
                if directory.size(key) != transfer.object_bytes or not directory.touch(
                    key, used_ns
                ):
                    missing[key] = transfer
                elif self._chunk(key) not in self._account:
                    unknown.append(key)
        self._reconcile(directory, unknown)
        return missing

    def _write(
        self,
        directory: NamespaceDirectory,
        missing: Mapping[OffloadKey, Transfer],
        verdicts: Verdicts,
    ) -> None:
        """Reserve room, write, and then give the files their names."""
        reserved: dict[OffloadKey, int] = {}
        used_ns: dict[OffloadKey, int] = {}
        written: dict[OffloadKey, str] = {}
        try:
            self._reserve(missing, reserved, verdicts)
            # Taken only now: the account has heard meanwhile how far the others are.
            used_ns.update(zip(reserved, self._times.take(len(reserved)), strict=True))
            for key in reserved:
                with self._judged(key, verdicts, "writable"):
                    written[key] = directory.write(key, missing[key].buffers, used_ns[key])
            placed = list(written)
        finally:
            # Even after an error that ends the batch: nothing stays reserved, and no file behind.
            if reserved:
                counted = {
                    key: Counted(self._chunk(key), reserved[key], used_ns[key]) for key in written
                }
                self._place(directory, written, counted, sum(reserved.values()), verdicts)
        for key in placed:
            with self._judged(key, verdicts, "writable"):
                directory.sync_name(key)
        if placed:
            # Again, where it was removed, or there was no room for it. The chunks matter more.
            with suppress(OSError):
                directory.write_manifest(self._manifest)

    def _place(
        self,
        directory: NamespaceDirectory,
        written: dict[OffloadKey, str],
        counted: Mapping[OffloadKey, Counted],
        reserved_bytes: int,
        verdicts: Verdicts,
    ) -> None:
        account = self._account
        try:
            with account.section(releasing_bytes=reserved_bytes):
                if written:
                    account.changing()
                for key, one in counted.items():
                    with self._judged(key, verdicts, "writable"):
                        directory.place(written.pop(key), key)
                        account.add(one)
        finally:
            for temporary in written.values():
                directory.discard(temporary)

    def _reserve(
        self,
        missing: Mapping[OffloadKey, Transfer],
        reserved: dict[OffloadKey, int],
        verdicts: Verdicts,
    ) -> None:
        account = self._account
        with account.section():
            headroom_bytes = self._root.headroom_bytes()
            for key, transfer in missing.items():
                used_bytes = account.used_bytes
                with self._judged(key, verdicts, "writable"):
                    self._make_room(transfer.object_bytes, headroom_bytes)
                    account.reserve(transfer.object_bytes)
                    reserved[key] = transfer.object_bytes
                if headroom_bytes is not None:
                    # Not asked again: some file systems free later what is unlinked now.
                    headroom_bytes += used_bytes - account.used_bytes

    def _make_room(self, need_bytes: int, headroom_bytes: int | None) -> None:
        """Evict, in a section of the account, from the own namespace or others."""
        account = self._account
        for chunk in account.victims(
            need_bytes,
            headroom_bytes,
            pinned=self._pins.chunks,
            last_used_ns=self._root.last_used_ns,
        ):
            account.changing()
            try:
                self._root.unlink(chunk)
            except OSError:
                # The next store tries others first.
                account.touch(chunk, self._times.take(1)[0])
                raise
            account.forget(chunk)

    def _reconcile(self, directory: NamespaceDirectory, keys: Sequence[OffloadKey]) -> None:
        """Let the account say of chunks what the disk says, and remove what can never be loaded."""
        if not keys:
            return
        account = self._account
        with account.section():
            for key in keys:
                chunk = self._chunk(key)
                size_bytes = directory.size(key)
                if size_bytes == self._object_bytes:
                    if chunk not in account:
                        account.add(Counted(chunk, size_bytes, directory.used_ns(key) or 0))
                    continue
                if size_bytes is not None:
                    account.changing()
                    directory.remove(key)
                if chunk in account:
                    account.forget(chunk)

    # Small things.

    def _moving(self, batch: Sequence[Transfer]) -> AbstractContextManager[None]:
        """None of the batch is evicted until all are through."""
        return self._pins.held([self._chunk(transfer.key) for transfer in batch])

    @contextmanager
    def _judged(self, key: OffloadKey, verdicts: Verdicts, ability: str) -> Iterator[None]:
        """Let an error be one key's verdict."""
        try:
            with self._translating(ability):
                yield
        except TierError as error:
            verdicts[key] = error

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

    def _chunk(self, key: OffloadKey) -> Chunk:
        return Chunk(self._fingerprint, key)
