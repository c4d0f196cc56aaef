"""Stores chunks under a root, and keeps the shared usage in agreement with the disk."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvtier_file.chunks import ChunkId, RecencyClock, StoredChunk
from kvtier_file.compiled import DONE, NOT_DONE
from kvtier_file.config import FileTierConfig
from kvtier_file.errors import FAULTS, chunk_error, open_error, tier_error
from kvtier_file.ledger import DELETED, EVICTED, EXPIRED
from kvtier_file.namespace import NamespaceDirectory
from kvtier_file.root import Root
from kvtier_file.shared_files import new_lease
from kvtier_file.shared_usage import SharedUsage
from kvtier_file.temporaries import Temporaries, temporary_names
from kvtier_sdk import (
    ChunkNotFoundError,
    Entry,
    OffloadKey,
    StoredNamespace,
    TierCapacityError,
    TierContext,
    TierError,
    Transfer,
    Usage,
    format_bytes,
)

Verdicts = dict[OffloadKey, TierError]

# A large batch is stored in steps, because evictions cannot free reserved room. Each step reserves
# at most the capacity divided by this number.
_MAX_STEPS = 64
_NO_LIMIT_BYTES = 2**50
# A refused write is logged only if the previous refused write is at least this long ago.
_REFUSALS_S = 600.0


class ChunkStore:
    """A store of chunks in files, within a capacity. Methods block and are thread-safe.

    Each rename or unlink happens under the shared lock, together with the change of the count. No
    chunk's bytes are read or written under the lock. A step of a store acquires the lock to reserve
    room, and again to rename the written files. A load acquires the lock only to correct the count.
    """

    def __init__(self, config: FileTierConfig, context: TierContext) -> None:
        self._config = config
        self._fingerprint = context.namespace.fingerprint
        self._manifest = context.namespace.manifest_json()
        self._digest_bytes = context.digest_bytes
        capacity_bytes = config.capacity_bytes or _NO_LIMIT_BYTES
        self._step_chunks = max(1, capacity_bytes // (_MAX_STEPS * context.object_bytes))
        self._pins = _Pins()
        lease = new_lease()
        self._root = Root(config, context, temporary_names(lease))
        self._usage = SharedUsage(self._root, lease, config.capacity_bytes, context)
        self._wall_s = context.clock.wall_s
        self._logger = context.logger
        self._evicted_age_s = context.gauge("evicted_age_seconds")
        self._clock = RecencyClock(context.clock, lambda: self._usage.budget.latest_ns)
        self._refused_s = -math.inf  # time of the last refused write; used under the shared lock
        self._lock = threading.Lock()  # guards the attributes below
        self._calls = 0
        self._is_open = False

    def open(self) -> None:
        """Open the root for lookups and loads; :meth:`count` must follow."""
        self._is_open = True
        try:
            self._root.open()
            self._root.check_capacity()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise open_error(error, self._config.root) from error
            raise

    def count(self) -> None:
        """Check the root, create directories and count chunks, while lookups and loads work."""
        try:
            with self._call():
                self._usage.open()
                # Prepare first, so that a bad setting is found before a long count.
                is_prepared = self._root.prepare(self._manifest)
                self._usage.sweep()
                with (
                    self._usage.locked(),
                    # The tier opens even if no room can be made. Only stores then fail.
                    suppress(TierCapacityError),
                ):
                    self._remove_expired()
                    self._make_room(0, self._root.headroom_bytes())
                if not is_prepared:
                    self._root.prepare(self._manifest)
        except OSError as error:
            raise open_error(error, self._config.root) from error

    def close(self) -> None:
        """Refuse further calls, and close the root once all running calls have ended."""
        # Close no descriptor during a call, because its number may be reused for another directory.
        with self._lock:
            self._is_open = False
            is_idle = not self._calls
        self._root.is_closing = True
        if is_idle:
            self._close_files()

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return true for each key whose chunk is on disk; remove files that cannot be loaded."""
        hits = []
        faults: Verdicts = {}
        # A miss needs the lock only if the chunk is counted, or if its file exists but cannot be
        # loaded. Other misses must not wait for the lock.
        surprising = []
        with self._directory("readable") as directory:
            outcomes = directory.touch_batch(keys, None)
            for key, outcome in zip(keys, outcomes, strict=True):
                found = None
                if outcome == NOT_DONE:
                    with self._fault(key, faults, "readable"):
                        found = directory.find(key)
                hits.append(outcome == DONE or self._is_loadable(found, directory))
                if not hits[-1] and (found or self._id(key) in self._usage.budget):
                    surprising.append(key)
            self._reconcile(directory, surprising)
        if faults and len(faults) == len(keys):
            raise faults[keys[0]]
        return hits

    def store(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        verdicts: Verdicts = {}
        ids = [self._id(transfer.key) for transfer in batch]
        with self._pins.held(ids), self._directory("writable") as directory:
            missing = list(self._missing(directory, batch, verdicts).items())
            for start in range(0, len(missing), self._step_chunks):
                step = missing[start : start + self._step_chunks]
                self._write(directory, dict(step), verdicts)
        return [verdicts.get(transfer.key) for transfer in batch]

    def load(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        verdicts: Verdicts = {}
        surprising = []
        times_ns = self._clock.take(len(batch))
        ids = [self._id(transfer.key) for transfer in batch]
        with self._pins.held(ids), self._directory("readable") as directory:
            read = directory.read_batch(batch, times_ns, self._digest_bytes)
            for transfer, chunk_id, used_ns, outcome, size_bytes, digest in zip(
                batch, ids, times_ns, *read, strict=True
            ):
                key = transfer.key
                if outcome == NOT_DONE:
                    with self._verdict(key, verdicts, "readable", at_file=True):
                        directory.read(transfer, used_ns)
                        transfer.verify()
                else:
                    try:
                        transfer.received(size_bytes)
                        transfer.verify(digest)
                    except TierError as damage:
                        verdicts[key] = damage
                found = not isinstance(verdicts.get(key), ChunkNotFoundError)
                if found != (chunk_id in self._usage.budget):
                    surprising.append(key)
            with suppress(OSError):  # the chunks are loaded, even if the count stays wrong
                self._reconcile(directory, surprising)
        return [verdicts.get(transfer.key) for transfer in batch]

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks; a failed removal does not stop the others."""
        failure: OSError | None = None
        with self._directory("writable") as directory:
            with self._usage.locked():
                self._usage.mark_dirty()
                for key in keys:
                    try:
                        removed = directory.remove(key)
                    except OSError as error:
                        failure = error
                        continue
                    if removed or self._id(key) in self._usage.budget:
                        self._usage.discard(self._id(key))
            if failure is not None:
                raise failure

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record uses of chunks in order, so that the last key becomes the most recently used."""
        times_ns = self._clock.take(len(keys))
        with self._directory("writable") as directory:
            outcomes = directory.touch_batch(keys, times_ns)
            for key, used_ns, outcome in zip(keys, times_ns, outcomes, strict=True):
                if outcome == NOT_DONE:
                    with self._fault(key, {}, "writable"):
                        directory.touch(key, used_ns)

    def list_shard(self, shard: str) -> list[Entry]:
        with self._directory("readable") as directory:
            return [
                entry_of(stored)
                for stored in directory.list_shard(shard)
                if self._is_loadable(stored, directory)
            ]

    def namespaces(self) -> list[StoredNamespace]:
        with self._translating("readable"), self._call():
            return [
                StoredNamespace.read(directory.fingerprint, directory.read_manifest())
                for directory in self._root.namespaces()
            ]

    def usage(self) -> Usage:
        with self._translating("readable"), self._call(), self._usage.locked():
            # Recount if the oldest files were removed by hand: the ledger lacks such removals.
            budget = self._usage.budget
            if any(self._root.last_used_ns(one) is None for one in budget.oldest()):
                self._usage.recount()
            return Usage(
                len(budget), budget.used_bytes, self._config.capacity_bytes, self._root.free_bytes()
            )

    def _missing(
        self, directory: NamespaceDirectory, batch: Sequence[Transfer], verdicts: Verdicts
    ) -> dict[OffloadKey, Transfer]:
        """Return the transfers to write; record a use of the other chunks."""
        # A chunk is written again if its file cannot be touched, or if the SDK replaces the chunk.
        missing = {}
        uncounted = []
        times_ns = self._clock.take(len(batch))
        outcomes = directory.touch_batch([transfer.key for transfer in batch], times_ns)
        for transfer, used_ns, outcome in zip(batch, times_ns, outcomes, strict=True):
            key = transfer.key
            # A file of any possible length counts as the chunk. If the file is unreadable or
            # damaged, a load fails, and the SDK then stores the chunk with ``replace``.
            if outcome == NOT_DONE and not transfer.replace:
                with self._verdict(key, verdicts, "writable"), self._fault(key, {}, "writable"):
                    if directory.touch(key, used_ns):
                        outcome = DONE
                if key in verdicts:
                    continue
            if outcome != DONE or transfer.replace:
                missing[key] = transfer
            elif self._id(key) not in self._usage.budget:
                uncounted.append(key)
        self._reconcile(directory, uncounted)
        return missing

    def _write(
        self,
        directory: NamespaceDirectory,
        missing: Mapping[OffloadKey, Transfer],
        verdicts: Verdicts,
    ) -> None:
        reserved: list[OffloadKey] = []
        written: dict[OffloadKey, tuple[str, StoredChunk]] = {}
        placed: Collection[OffloadKey] = ()
        try:
            self._reserve(missing, reserved, verdicts, directory.temporaries)
            # Take the times after the reservation, which has read the uses by other processes.
            chunks = {
                key: StoredChunk(self._fingerprint, key, missing[key].object_bytes, used_ns)
                for key, used_ns in zip(reserved, self._clock.take(len(reserved)), strict=True)
            }
            stores = [missing[key] for key in reserved]
            stored_ns = [chunk.used_ns for chunk in chunks.values()]
            temporaries = directory.write_batch(stores, stored_ns, self._digest_bytes)
            written = {
                key: (temporary, chunks[key])
                for key, temporary in zip(reserved, temporaries, strict=True)
                if temporary is not None
            }
            for key, chunk in chunks.items():
                if key not in written:
                    with self._verdict(key, verdicts, "writable"):
                        temporary = self._write_one(directory, missing[key], chunk.used_ns)
                        written[key] = (temporary, chunk)
        finally:
            # Place the files even after an error, so that no reservation or temporary file remains.
            if reserved:
                reserved_bytes = sum(missing[key].object_bytes for key in reserved)
                placed = self._place(directory, written, reserved_bytes, verdicts)
        for key in placed if self._config.fsync else ():
            with self._verdict(key, verdicts, "writable"):
                directory.sync_name(key)
        if placed:
            # Write the manifest again if it was removed or had no room. Stores succeed without it.
            with suppress(OSError):
                directory.write_manifest(self._manifest)

    def _write_one(self, directory: NamespaceDirectory, transfer: Transfer, used_ns: int) -> str:
        """Write a chunk's file and return its name; evict chunks if the file system is full."""
        # The free space says nothing about inodes and quotas. Evict twice, because the shard and
        # the file may need an inode each.
        for _ in range(2):
            try:
                return directory.write(transfer.key, transfer.buffers, used_ns)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                reason = os.strerror(error.errno)
            with suppress(TierCapacityError), self._usage.locked():
                self._note_refusal(reason)
                # This headroom makes the call evict at least as many bytes as the new chunk needs.
                self._make_room(0, self._usage.reserved_bytes - transfer.object_bytes)
        return directory.write(transfer.key, transfer.buffers, used_ns)

    def _note_refusal(self, reason: str) -> None:
        """Log a refusal unless the last refusal is recent. The caller must hold the shared lock."""
        now_s = self._wall_s()
        if not self._refused_s <= now_s < self._refused_s + _REFUSALS_S:
            self._logger.warning(
                "the file system of tier root '%s' refused a write with %s free (%s): chunks are "
                "evicted for it, whatever the capacity; look at its inodes (df -i) and quotas, "
                "and at what others store there",
                self._config.root,
                format_bytes(self._root.free_bytes()),
                reason,
            )
        self._refused_s = now_s

    def _reserve(
        self,
        missing: Mapping[OffloadKey, Transfer],
        reserved: list[OffloadKey],
        verdicts: Verdicts,
        temporaries: Temporaries,
    ) -> None:
        """Reserve room for chunks; add each to ``reserved`` as soon as it has room."""
        usage = self._usage
        with usage.locked():
            self._remove_expired()
            free_bytes = self._root.headroom_bytes()
            # Compute this only once, because some file systems free the room of removed files late.
            most_bytes = None if free_bytes is None else free_bytes + usage.budget.used_bytes

            def reserve(keys: Collection[OffloadKey]) -> None:
                headroom_bytes = (
                    None if most_bytes is None else most_bytes - usage.budget.used_bytes
                )
                need_bytes = sum(missing[key].object_bytes for key in keys)
                self._make_room(need_bytes, headroom_bytes, temporaries, spares=len(keys))
                usage.reserve(need_bytes)
                reserved.extend(keys)

            try:
                # Reserve all at once, because choosing victims costs as much for one as for many.
                reserve(missing)
            except (OSError, TierCapacityError):
                for key in missing:
                    with self._verdict(key, verdicts, "writable"):
                        reserve([key])

    def _place(
        self,
        directory: NamespaceDirectory,
        written: Mapping[OffloadKey, tuple[str, StoredChunk]],
        reserved_bytes: int,
        verdicts: Verdicts,
    ) -> Collection[OffloadKey]:
        """Rename and count written chunks, and end the reservations; return the placed keys."""
        usage = self._usage
        unplaced = dict(written)
        try:
            with usage.locked(releasing_bytes=reserved_bytes):
                if written:
                    usage.mark_dirty()
                outcomes = directory.place_batch(
                    [(temporary, key) for key, (temporary, _) in written.items()]
                )
                for outcome, (key, (temporary, chunk)) in zip(
                    outcomes, written.items(), strict=True
                ):
                    with self._verdict(key, verdicts, "writable", at_file=True):
                        if outcome == NOT_DONE:
                            directory.place(temporary, key)
                        usage.record(chunk)
                        del unplaced[key]
        finally:
            for temporary, _ in unplaced.values():
                directory.temporaries.discard(temporary)
        return written.keys() - unplaced.keys()

    def _remove_expired(self) -> None:
        """Remove expired chunks of all namespaces. The caller must hold the shared lock."""
        expired_ns = self._root.lifetime().expired_ns
        if expired_ns:
            expired = self._usage.budget.expired(expired_ns, pinned=self._pins.pinned())
            with suppress(OSError):  # expired chunks are misses anyway; the next store tries again
                self._remove(expired, EXPIRED)

    def _make_room(
        self,
        need_bytes: int,
        headroom_bytes: int | None,
        into: Temporaries | None = None,
        *,
        spares: int = 0,
    ) -> None:
        """Evict chunks; keep ``spares`` of their files in ``into``. The caller holds the lock."""
        self._usage.budget.capacity_bytes = self._config.capacity_bytes
        victims = self._usage.victims(need_bytes, headroom_bytes, self._pins.pinned)
        if victims and (used_ns := self._root.last_used_ns(victims[0])) is not None:
            self._evicted_age_s.set(max(0.0, self._wall_s() - used_ns / 1e9))
        self._remove(victims[:spares], EVICTED, into)
        self._remove(victims[spares:], EVICTED)

    def _remove(
        self, chunk_ids: Iterable[ChunkId], reason: int, into: Temporaries | None = None
    ) -> None:
        usage = self._usage
        for chunk_id in chunk_ids:
            usage.mark_dirty()
            try:
                self._root.remove(chunk_id, into)
            except OSError:
                # Mark the chunk as used, so that the next store evicts other chunks first.
                usage.budget.touch(chunk_id, self._clock.take(1)[0])
                raise
            usage.discard(chunk_id, reason)

    def _reconcile(self, directory: NamespaceDirectory, keys: Sequence[OffloadKey]) -> None:
        """Correct the count to match the disk for ``keys``; remove files that cannot be loaded."""
        # Before the first count there is nothing to correct.
        if not keys or not self._usage.is_counted:
            return
        usage = self._usage
        with usage.locked():
            for key in keys:
                with self._fault(key, {}, "writable"):
                    found = directory.find(key)
                    if found and self._is_loadable(found, directory):
                        if self._id(key) not in usage.budget:
                            usage.record(found)
                        continue
                    reason = DELETED
                    if found:
                        usage.mark_dirty()
                        directory.remove(key)
                        if found.size_bytes in directory.lengths:
                            reason = EXPIRED
                    if self._id(key) in usage.budget:
                        usage.discard(self._id(key), reason)

    def _is_loadable(self, found: StoredChunk | None, directory: NamespaceDirectory) -> bool:
        return (
            found is not None
            and found.size_bytes in directory.lengths
            and found.used_ns >= directory.lifetime.expired_ns
        )

    @contextmanager
    def _directory(self, ability: str) -> Iterator[NamespaceDirectory]:
        with self._translating(ability), self._call(), self._root.namespace() as directory:
            yield directory

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Keep the root open during the ``with`` block."""
        with self._lock:
            if not self._is_open:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                is_last = not self._is_open and not self._calls
            if is_last:
                self._close_files()

    def _close_files(self) -> None:
        self._usage.close()
        self._root.close()

    def _verdict(
        self, key: OffloadKey, verdicts: Verdicts, ability: str, *, at_file: bool = False
    ) -> _Verdict:
        """Record a ``with`` block's error; ``at_file`` makes errnos in ``FAULTS`` ChunkErrors."""
        return _Verdict(self._config.root, key, verdicts, ability, FAULTS if at_file else ())

    @contextmanager
    def _fault(self, key: OffloadKey, faults: Verdicts, ability: str) -> Iterator[None]:
        """Record an error that affects only one chunk's file; let other errors propagate."""
        try:
            yield
        except OSError as error:
            if error.errno not in FAULTS:
                raise
            faults[key] = chunk_error(error, self._config.root, ability)

    @contextmanager
    def _translating(self, ability: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise tier_error(error, self._config.root, ability) from error

    def _id(self, key: OffloadKey) -> ChunkId:
        return ChunkId(self._fingerprint, key)


@dataclass(slots=True)
class _Verdict:
    """Records a ``with`` block's error. A class is twice as fast as ``@contextmanager``."""

    root: Path
    key: OffloadKey
    verdicts: Verdicts
    ability: str
    faults: Collection[int]

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, OSError):
            translate = chunk_error if error.errno in self.faults else tier_error
            # Drop the cause, because its traceback would keep the buffers alive.
            error = translate(error, self.root, self.ability)
        if not isinstance(error, TierError):
            return False
        self.verdicts[self.key] = error
        return True


class _Pins:
    """The chunks that this process reads or writes, and must not evict."""

    # Other processes need not see the pins. If a file is unlinked during a read, it stays readable;
    # if it is unlinked before the read, the chunk is a miss.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, Collection[ChunkId]] = {}

    @contextmanager
    def held(self, chunk_ids: Collection[ChunkId]) -> Iterator[None]:
        with self._lock:
            self._batches[id(chunk_ids)] = chunk_ids
        try:
            yield
        finally:
            with self._lock:
                del self._batches[id(chunk_ids)]

    def pinned(self) -> frozenset[ChunkId]:
        with self._lock:
            return frozenset().union(*self._batches.values())


def entry_of(stored: StoredChunk) -> Entry:
    return Entry(stored.key, stored.size_bytes, stored.used_ns / 1e9)
