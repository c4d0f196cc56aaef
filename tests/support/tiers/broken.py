"""Tiers that break the contract, each in one way; the conformance kit must reject them.

Each tier is a small change to :class:`support.tiers.shelf.ShelfTier` that could pass a review. A
class's argument ``fails`` names the only check that rejects the tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import numpy as np
from xxhash import xxh3_128_digest

from kvtier_sdk.errors import (
    ConfigError,
    CorruptChunkError,
    TierCapacityError,
    TierError,
    TierUnavailableError,
)
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.types import Entry, OffloadKey, RequestContext, Transfer, Usage, split_offload_key
from support.tiers.shelf import SHELVES, Shelf, ShelfName, ShelfTier

_MOMENT_S = 0.001
_LATER_S = 0.02
_LIMIT_S = 0.5


class BrokenTier(ShelfTier):
    fails: ClassVar[str]
    # Text that the check's error must contain, in addition to the rule.
    message: ClassVar[str] = ""
    # Arguments for :class:`kvtier_sdk.testing.TierSubject`.
    settings: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, fails: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        # The only check that rejects the tier. A subclass without ``fails`` inherits the check.
        cls.fails = fails or cls.fails


class WrongOrder(BrokenTier, fails="check_results_have_the_order_of_the_batch"):
    """Pushes the answers on a stack, and pops them in reverse order."""

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return list(reversed(await super().lookup(keys, request)))


class VerdictsInWrongOrder(BrokenTier, fails="check_results_have_the_order_of_the_batch"):
    """Loads in order, and returns the verdicts from the last to the first."""

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return list(reversed(await super().load(batch)))


class RemembersDigests(BrokenTier, fails="check_a_brought_digest_is_right"):
    """Reports the digest of the stored bytes after a load, without reading the loaded bytes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._digests: dict[OffloadKey, bytes] = {}

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        for transfer in batch:
            digest = xxh3_128_digest(transfer.payload[: self.context.digest_bytes])
            self._digests[transfer.key] = digest
            transfer.seal(digest)
        return await super().store(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        verdicts = await super().load(batch)
        for transfer, verdict in zip(batch, verdicts, strict=True):
            if verdict is None:
                transfer.verify(self._digests.get(transfer.key))
        return verdicts


class WrongCount(BrokenTier, fails="check_results_have_the_length_of_the_batch"):
    """Works in groups of four chunks, and drops the verdicts of an incomplete last group."""

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        verdicts = await super().load(batch)
        return verdicts if len(batch) < 4 else verdicts[: len(batch) // 4 * 4]


class EmptyBatchIsAnError(BrokenTier, fails="check_an_empty_batch_is_no_results"):
    """Reads the first chunk of a batch without checking whether the batch is empty."""

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self.context.logger.debug("first of a batch: %s", batch[0].key.hex())
        return await super().store(batch)


class OneFailureFailsAll(BrokenTier, fails="check_one_failure_fails_alone"):
    """Raises the first failure, though the other chunks of the batch were loaded."""

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        verdicts = await super().load(batch)
        for verdict in verdicts:
            if verdict is not None:
                raise verdict
        return verdicts


class BigBatchIsAnError(BrokenTier, fails="check_big_batches"):
    """Puts all keys of a batch into one SQL statement, which allows at most 999 variables."""

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        if len(keys) > 999:
            raise TierError("too many SQL variables")
        return await super().lookup(keys, request)


class RaisesForeignError(BrokenTier, fails="check_only_tier_errors_are_raised"):
    """Reads the first byte of an object, and raises IndexError if the object is empty."""

    async def load_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        stored = self.take(transfer.key)
        if stored[0] == 0xFE and stored.startswith(b"\xfe old format"):
            raise TierError("an object of an old format")
        transfer.fill(stored)


class MixesABatchUp(BrokenTier, fails="check_what_is_stored_comes_back"):
    """Stores the last chunk's bytes under every key of a batch of four or more."""

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        if len(batch) < 4:
            return await super().store(batch)
        await self.reach()
        content = b""
        for transfer in batch:
            content = b"".join(transfer.buffers)
        for transfer in batch:
            self.put(transfer.key, content)
        return [None] * len(batch)


class GuessesLookups(BrokenTier, fails="check_lookup_tells_stored_from_absent"):
    """Checks whether any chunk of a batch is stored, and returns this result for every chunk."""

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        answers = await super().lookup(keys, request)
        return [any(answers)] * len(keys)


class AbsentIsSuccess(BrokenTier, fails="check_absent_is_not_found"):
    """Mistakes a reply without any chunk for a reply without any error."""

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        verdicts = await super().load(batch)
        if len(batch) > 1 and all(verdict is not None for verdict in verdicts):
            return [None] * len(batch)
        return verdicts


class NeverReplaces(BrokenTier, fails="check_a_store_replaces_on_demand"):
    """Skips the store of an existing chunk, even if the chunk failed to load."""

    async def store_chunk(self, transfer: Transfer) -> None:
        if not await self.contains_chunk(transfer.key):
            await super().store_chunk(transfer)


class StoringTwiceIsAnError(BrokenTier, fails="check_storing_twice_is_harmless"):
    """Inserts a chunk, and fails if the chunk exists already."""

    async def store_chunk(self, transfer: Transfer) -> None:
        if not transfer.replace and self.name_of(transfer.key) in self.shelf.objects:
            raise TierError("duplicate key value violates unique constraint")
        await super().store_chunk(transfer)


class ScribblesOnBuffers(BrokenTier, fails="check_store_leaves_its_buffers_alone"):
    """Marks a stored chunk by changing the header in the transfer's own buffer."""

    async def store_chunk(self, transfer: Transfer) -> None:
        await super().store_chunk(transfer)
        transfer.header[0] ^= 0x80


class TakesShortForWhole(BrokenTier, fails="check_another_length_is_corrupt"):
    """Does not check how many bytes a read returned."""

    async def load_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        stored = self.take(transfer.key)
        length = self.shelf.lengths[self.name_of(transfer.key)]
        transfer.fill(stored.ljust(length, b"\x00")[:length])


class ForgetsToReportLengths(BrokenTier, fails="check_objects_of_any_length"):
    """Checks an object's length, but does not report it."""

    message = "the tier must call transfer.received(object_bytes)"

    async def load_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        stored, split = self.take(transfer.key), len(transfer.header)
        if len(stored) != self.shelf.lengths[self.name_of(transfer.key)]:
            raise CorruptChunkError("cut off or extended")
        transfer.header[:] = stored[:split]
        transfer.payload[: len(stored) - split] = stored[split:]


class LeavesTheOldEnd(BrokenTier, fails="check_objects_of_any_length"):
    """Overwrites an object in place, so that the end of a longer old object remains."""

    message = "followed by the end of the longer one that it replaced"

    def put(self, key: OffloadKey, stored: bytes) -> None:
        older = self.shelf.objects.get(self.name_of(key), b"")
        super().put(key, stored + older[len(stored) :])


class HangsOnAnotherLength(BrokenTier, fails="check_another_length_is_corrupt"):
    """Reads the expected length, then mistakes the rest of the object for the next reply."""

    _lost = False

    async def load_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        stored = self.take(transfer.key)
        self._lost = self._lost or len(stored) > transfer.object_bytes
        if self._lost:
            raise TierUnavailableError("the reply cannot be parsed")
        transfer.fill(stored)


class AssumesAddresses(BrokenTier, fails="check_buffers_at_any_address"):
    """Declares no alignment, but needs buffers that are aligned to eight bytes."""

    async def store_chunk(self, transfer: Transfer) -> None:
        if np.frombuffer(transfer.payload, np.uint8).ctypes.data % 8:
            raise TierError("Invalid argument")
        await super().store_chunk(transfer)


class AssumesLengths(BrokenTier, fails="check_chunks_of_any_length"):
    """Divides a chunk into words, and fails if its length is not a multiple of eight."""

    async def store_chunk(self, transfer: Transfer) -> None:
        if self.context.payload_bytes % 8:
            raise TierError("Invalid argument")
        await super().store_chunk(transfer)


class IgnoresTheGroup(BrokenTier, fails="check_groups_are_apart"):
    """Names objects by the chain hash alone, so groups overwrite each other's chunks."""

    def name_of(self, key: OffloadKey) -> ShelfName:
        return super().name_of(split_offload_key(key)[0])


class FoldsCase(BrokenTier, fails="check_similar_keys_are_apart"):
    """Keeps its objects in a store that ignores case."""

    def name_of(self, key: OffloadKey) -> ShelfName:
        return super().name_of(key.lower())


class TakesKeysForText(BrokenTier, fails="check_keys_of_any_bytes"):
    """Decodes a key as text, and replaces every undecodable byte with the same character."""

    def name_of(self, key: OffloadKey) -> ShelfName:
        return super().name_of(key.decode("ascii", "replace").encode())


class IgnoresTheNamespace(BrokenTier, fails="check_namespaces_are_apart"):
    """Names objects by the key alone, so models overwrite each other's chunks."""

    def name_of(self, key: OffloadKey) -> ShelfName:
        return self.context.namespace.manifest["run"], key  # type: ignore[return-value]


class LosesConcurrentStores(BrokenTier, fails="check_concurrent_stores_leave_one_whole_object"):
    """Writes under a temporary name that two stores of one key share."""

    fan_out = 1

    async def store_chunk(self, transfer: Transfer) -> None:
        name, temporary = self.name_of(transfer.key), ("temporary", transfer.key)
        objects = self.shelf.objects
        objects[temporary] = b"".join(transfer.buffers)
        try:
            await self.reach()
        except BaseException:
            objects.pop(temporary, None)
            raise
        # The store that ends last finds no temporary object, and removes the chunk's final object.
        if temporary in objects:
            stored = objects.pop(temporary)
            self.put(transfer.key, stored)
        else:
            objects.pop(name, None)


class ShowsPartlyWritten(BrokenTier, fails="check_no_partly_written_object_is_visible"):
    """Writes under the final name, and cleans up only after a failure."""

    async def store_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        name, whole = self.name_of(transfer.key), b"".join(transfer.buffers)
        before = self.shelf.objects.get(name)
        self.put(transfer.key, half_of(whole))
        try:
            await self.context.clock.sleep(_MOMENT_S)
        except BaseException:
            self._put_back(name, before)
            raise
        self.put(transfer.key, whole)

    def _put_back(self, name: ShelfName, before: bytes | None) -> None:
        if before is None:
            self.shelf.objects.pop(name, None)
        else:
            self.shelf.objects[name] = before


class KeepsHeaderApart(ShowsPartlyWritten):
    """Keeps header and payload as two objects, and replaces them one after the other."""

    async def store_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        name, header = self.name_of(transfer.key), bytes(transfer.header)
        payload = bytes(transfer.payload)
        before = self.shelf.objects.get(name)
        if before is not None and len(before) == transfer.object_bytes:
            self.put(transfer.key, header + before[len(header) :])
            try:
                await self.context.clock.sleep(_MOMENT_S)
            except BaseException:
                self._put_back(name, before)
                raise
        self.put(transfer.key, header + payload)


class OutlivesCancellation(BrokenTier, fails="check_a_cancelled_call_ends"):
    """Keeps waiting for a load to complete after the call was cancelled."""

    async def load_chunk(self, transfer: Transfer) -> None:
        await super().load_chunk(transfer)
        try:
            await self.context.clock.sleep(_LATER_S)
        except asyncio.CancelledError:
            await asyncio.Event().wait()


class WritesLate(BrokenTier, fails="check_a_cancelled_load_writes_nothing_more"):
    """Returns from a cancelled load at once, while a task still fills the load's buffers."""

    async def load_chunk(self, transfer: Transfer) -> None:
        try:
            await super().load_chunk(transfer)
        except asyncio.CancelledError:
            self._reading = self.context.clock.spawn(self._read(transfer), name="read on")
            raise

    async def _read(self, transfer: Transfer) -> None:
        await self.context.clock.sleep(_LATER_S)
        transfer.fill(self.take(transfer.key))


class ReadsLate(BrokenTier, fails="check_a_cancelled_store_reads_nothing_more"):
    """Returns from a cancelled store at once, while a task still reads the store's buffers."""

    async def store_chunk(self, transfer: Transfer) -> None:
        try:
            await super().store_chunk(transfer)
        except asyncio.CancelledError:
            self._writing = self.context.clock.spawn(self._write(transfer), name="write on")
            raise

    async def _write(self, transfer: Transfer) -> None:
        await self.context.clock.sleep(_LATER_S)
        self.put(transfer.key, b"".join(transfer.buffers))


class LeavesAPart(BrokenTier, fails="check_a_cancelled_store_leaves_no_part"):
    """Keeps the part that a cancelled store has written, under the final name."""

    async def store_chunk(self, transfer: Transfer) -> None:
        whole = b"".join(transfer.buffers)
        try:
            await self.reach()
        except asyncio.CancelledError:
            self.put(transfer.key, half_of(whole))
            raise
        self.put(transfer.key, whole)


class BlocksTheLoop(BrokenTier, fails="check_the_loop_is_never_blocked"):
    """Reads its index from disk on the event loop, for a lookup of many keys."""

    settings: ClassVar[dict[str, Any]] = {"blocking_s": 0.2}

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        if len(keys) > 16:
            time.sleep(0.5)  # the fault
        return await super().lookup(keys, request)


class LeavesATask(BrokenTier, fails="check_no_task_is_left"):
    """Starts a heartbeat and never stops it."""

    async def open(self) -> None:
        await super().open()
        self._heart = self.context.clock.spawn(self._beat(), name="endless heartbeat")

    async def _beat(self) -> None:
        while True:
            await self.context.clock.sleep(60)


class LeavesAThread(BrokenTier, fails="check_no_thread_is_left"):
    """Starts a thread that waits for work forever."""

    async def open(self) -> None:
        await super().open()
        threading.Thread(target=threading.Event().wait, name="left behind", daemon=True).start()


class LeavesADescriptor(BrokenTier, fails="check_no_descriptor_is_left"):
    """Opens a directory and never closes the descriptor."""

    async def open(self) -> None:
        await super().open()
        self._directory = os.open("/", os.O_RDONLY)


class KeepsABuffer(BrokenTier, fails="check_no_buffer_is_kept"):
    """Keeps a reference to the last transfer, and so to its buffers."""

    async def load_chunk(self, transfer: Transfer) -> None:
        self._last = transfer
        await super().load_chunk(transfer)


class AcceptsNonsense(BrokenTier, fails="check_bad_settings_fail_in_open"):
    """Logs that a setting is wrong, and continues."""

    async def open(self) -> None:
        try:
            await super().open()
        except ConfigError as error:
            self.context.logger.debug("%s", error)


class TakesNonsenseForAnOutage(BrokenTier, fails="check_bad_settings_fail_in_open"):
    """Reports every failure of open as an outage, even a wrong setting."""

    async def open(self) -> None:
        try:
            await super().open()
        except ConfigError as error:
            raise TierUnavailableError(str(error)) from error


class ClosesForAll(BrokenTier, fails="check_instances_are_independent"):
    """Shares one connection among all instances, and closes it when any instance closes."""

    async def open(self) -> None:
        self.shelf.marks.discard("closed")
        await super().open()

    async def reach(self) -> None:
        if "closed" in self.shelf.marks:
            raise TierUnavailableError("the connection is closed")
        await super().reach()

    async def close(self) -> None:
        self.shelf.marks.add("closed")


class KeepsToItsProcess(BrokenTier, fails="check_processes_share_a_place"):
    """Keeps its index in memory, and never sees the chunks that other processes store."""

    @property
    def shelf(self) -> Shelf:
        return Shelf.named(os.path.basename(self.config.shelf))


class ForgetsInClose(BrokenTier, fails="check_chunks_outlive_the_instance"):
    """Deletes its chunks when it closes, so that the next instance starts empty."""

    async def close(self) -> None:
        fingerprint = self.context.namespace.fingerprint
        for name in [name for name in self.shelf.objects if name[0] == fingerprint]:
            del self.shelf.objects[name]


class CloseHangs(BrokenTier, fails="check_close_ends"):
    """Waits in close for the first call, even if no call was ever made."""

    _used: asyncio.Event | None = None

    async def open(self) -> None:
        await super().open()
        self._used = asyncio.Event()

    async def reach(self) -> None:
        if self._used is not None:
            self._used.set()
        await super().reach()

    async def close(self) -> None:
        if self._used is not None:
            await self._used.wait()


class CloseForgetsCalls(BrokenTier, fails="check_close_ends_what_runs"):
    """Discards outstanding replies when it closes, so that their callers wait forever."""

    _closed = False

    async def load_chunk(self, transfer: Transfer) -> None:
        await super().load_chunk(transfer)
        if self._closed:
            await asyncio.Event().wait()

    async def close(self) -> None:
        self._closed = True


class ClosesOnlyOnce(BrokenTier, fails="check_closing_twice_is_harmless"):
    """Closes its connection without checking whether the connection is already closed."""

    _connection: Any = object()

    async def close(self) -> None:
        if self._connection is None:
            raise TierError("no connection to close")
        self._connection = None


class FillsTheGap(BrokenTier, fails="check_a_lost_part_is_a_miss"):
    """Reads a lost part of a chunk as zeros."""

    def mend(self, stored: bytes) -> bytes:
        return half_of(stored)


class LooksAtTheFirstPart(BrokenTier, fails="check_a_lost_part_is_a_miss"):
    """Checks in a lookup only whether the first part of a chunk exists."""

    async def contains_chunk(self, key: OffloadKey) -> bool:
        await self.reach()
        self.expire(self.name_of(key))
        return self.name_of(key) in self.shelf.objects


class TakesALostPartForAnOutage(BrokenTier, fails="check_a_lost_part_is_a_miss"):
    """Reports a lost part of a chunk as an outage of the server."""

    def mend(self, stored: bytes) -> bytes:
        raise TierUnavailableError("a shard does not have its part")


class NeverHealsAPart(BrokenTier, fails="check_a_lost_part_is_a_miss"):
    """Skips the store of a chunk whose first part exists, even if the chunk failed to load."""

    def put(self, key: OffloadKey, stored: bytes) -> None:
        if self.name_of(key) not in self.shelf.torn:
            super().put(key, stored)


class TakesAHangForAMiss(BrokenTier, fails="check_a_hang_is_no_miss"):
    """Gives a lookup a time limit, and reports a miss when the limit has passed."""

    async def contains_chunk(self, key: OffloadKey) -> bool:
        try:
            async with self.context.clock.timeout(_LIMIT_S):
                return await super().contains_chunk(key)
        except TimeoutError:
            return False


class HangsWithItsStore(BrokenTier, fails="check_a_tier_comes_back_after_a_hang"):
    """Reuses a connection on which the reply to a cancelled call is still outstanding."""

    _waits_for_a_reply = False

    async def reach(self) -> None:
        if self._waits_for_a_reply:
            raise TierUnavailableError("the reply is another request's")
        try:
            await super().reach()
        except asyncio.CancelledError:
            self._waits_for_a_reply = self.shelf.hangs
            raise


class SwallowsOutages(BrokenTier, fails="check_an_outage_is_no_miss"):
    """Reports a chunk as absent during an outage."""

    async def contains_chunk(self, key: OffloadKey) -> bool:
        try:
            return await super().contains_chunk(key)
        except TierUnavailableError:
            return False


class ForgetsToDelete(BrokenTier, fails="check_an_outage_is_no_miss"):
    """Treats a chunk as deleted although the delete never reached the store."""

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        with contextlib.suppress(TierUnavailableError):
            await super().delete(keys)


class TakesACutForTheEnd(BrokenTier, fails="check_an_outage_in_mid_transfer_damages_nothing"):
    """Reads until the connection ends, and mistakes a cut connection for the end of the object."""

    async def load_chunk(self, transfer: Transfer) -> None:
        was_connected = self.shelf.connected
        try:
            await super().load_chunk(transfer)
        except TierUnavailableError:
            if not was_connected:
                raise
            transfer.payload[: len(transfer.payload) // 2] = bytes(len(transfer.payload) // 2)


class StaysAway(BrokenTier, fails="check_a_tier_comes_back_after_an_outage"):
    """Never uses its store again after the first outage."""

    _given_up = False

    async def reach(self) -> None:
        if self._given_up:
            raise TierUnavailableError("switched off after a failure")
        try:
            await super().reach()
        except TierUnavailableError:
            self._given_up = True
            raise


class DeletesOnlyWhatIsThere(BrokenTier, fails="check_delete_forgets"):
    """Raises an error if a chunk to delete is missing."""

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.take(key)
        await super().delete(keys)


class TouchStores(BrokenTier, fails="check_touch_changes_nothing"):
    """Records the use of a missing chunk, and thereby creates an empty object."""

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self.reach()
        for key in keys:
            self.shelf.objects.setdefault(self.name_of(key), b"")


class ScansWithoutHeader(BrokenTier, fails="check_scan_lists_what_is_stored"):
    """Lists the length of the payload instead of the length of the whole object."""

    async def scan(self) -> AsyncIterator[Entry]:
        async for entry in super().scan():
            yield Entry(entry.key, entry.object_bytes - self.context.header_bytes)


class ScansWithOneLength(BrokenTier, fails="check_scan_lists_what_is_stored"):
    """Lists every object as if it had full length."""

    async def scan(self) -> AsyncIterator[Entry]:
        async for entry in super().scan():
            yield Entry(entry.key, self.context.object_bytes)


class ListsItsOwnNamespace(BrokenTier, fails="check_namespaces_are_listed"):
    """Lists only the namespace of its own chunks."""

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        async for namespace in super().namespaces():
            if namespace == self.context.namespace:
                yield namespace


class MakesWhatItLooksInto(BrokenTier, fails="check_maintenance_makes_no_namespace"):
    """Writes its manifest even when a maintenance tool opens the tier."""

    async def open(self) -> None:
        await super().open()
        self.write_manifest()


class UsesWhatItExamines(BrokenTier, fails="check_maintenance_records_no_use"):
    """Records a use when a maintenance tool loads a chunk."""

    async def load_chunk(self, transfer: Transfer) -> None:
        await super().load_chunk(transfer)
        self.use(transfer.key)


class CountsNothing(BrokenTier, fails="check_usage_counts_what_is_stored"):
    """Always reports that no chunks and no bytes are stored."""

    async def usage(self) -> Usage:
        return Usage(0, 0, None)


class CountsItsOwn(BrokenTier, fails="check_usage_counts_what_is_stored"):
    """Counts only the chunks that this instance has stored."""

    _used_bytes = 0

    def put(self, key: OffloadKey, stored: bytes) -> None:
        super().put(key, stored)
        self._used_bytes += len(stored)

    async def usage(self) -> Usage:
        return Usage(None, self._used_bytes, None)


class ReportsWhatItKeeps(BrokenTier, fails="check_a_reported_removal_is_true"):
    """Reports the oldest chunk as evicted, but keeps the chunk."""

    async def store_chunk(self, transfer: Transfer) -> None:
        try:
            await super().store_chunk(transfer)
        except TierCapacityError:
            _, oldest = next(iter(self.shelf.objects))
            self.context.report_removed([oldest], evicted=True)
            raise


class LoadsWhatHasExpired(BrokenTier, fails="check_an_expired_chunk_is_absent"):
    """Checks a chunk's age only in a lookup, so that a load returns an expired chunk."""

    async def contains_chunk(self, key: OffloadKey) -> bool:
        return await super().contains_chunk(key) and not self.is_expired(self.name_of(key))

    def expire(self, name: ShelfName) -> None:
        pass


class RenewsTheAge(BrokenTier, fails="check_no_use_extends_the_maximum_age"):
    """Resets a chunk's age at each use, as if the chunk had just been stored."""

    def use(self, key: OffloadKey) -> None:
        super().use(key)
        self.shelf.stored_s[self.name_of(key)] = self.context.clock.wall_s()


class FullIsAnyError(BrokenTier, fails="check_a_full_tier_refuses_or_makes_room"):
    """Raises a general error instead of :class:`TierCapacityError` when the store is full."""

    async def store_chunk(self, transfer: Transfer) -> None:
        try:
            await super().store_chunk(transfer)
        except TierCapacityError as error:
            raise TierError(f"write failed: {error}") from error


class NeedsItsParent(BrokenTier, fails="check_it_runs_in_a_process"):
    """Finds its store in a variable that only the engine's process has set."""

    async def open(self) -> None:
        if self.config.shelf not in SHELVES:
            raise ConfigError("the store is not registered")
        await super().open()


def half_of(whole: bytes) -> bytes:
    return whole[: len(whole) // 2].ljust(len(whole), b"\x00")


def _leaves(of: type[BrokenTier]) -> list[type[BrokenTier]]:
    return [leaf for found in of.__subclasses__() for leaf in (found, *_leaves(found))]


BROKEN_TIERS: tuple[type[BrokenTier], ...] = tuple(_leaves(BrokenTier))
