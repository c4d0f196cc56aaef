"""Checks of the plain truth: what was stored is there, what was not is not."""

from __future__ import annotations

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.probe import is_miss, told
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject

_FOUND = "None once a later load will find the chunk."
_ODD_LENGTHS = (1, 63, 4095, 4097, 100_003)


@check(says=_FOUND)
async def check_what_is_stored_comes_back(subject: TierSubject) -> None:
    """A chunk whose store succeeded is loaded again, byte for byte."""
    async with subject.opened() as probe:
        for key in await probe.put(subject.new_keys(4)):
            await probe.expect(key, 0)


@check(says="One truth value a key, in the order of keys.")
async def check_lookup_tells_stored_from_absent(subject: TierSubject) -> None:
    """Lookup says False of a chunk that was never stored, and True of one that was."""
    async with subject.opened() as probe:
        (absent,) = subject.new_keys(1)
        if await probe.lookup([absent]) != [False]:
            raise Breach("lookup says True of a chunk that was never stored")
        stored = await probe.put_one()
        if stored is None:
            return
        if await probe.lookup([stored]) != [True]:
            raise Breach("lookup says False of a chunk that has just been stored")
        if await probe.lookup([stored, absent]) == [True, True]:
            raise Breach("lookup says True of a chunk that was never stored, beside one that was")


@check(says="one that is not there a ChunkNotFoundError.")
async def check_absent_is_not_found(subject: TierSubject) -> None:
    """Loading a chunk that was never stored is a ChunkNotFoundError."""
    async with subject.opened() as probe:
        for verdict in await probe.load([probe.empty(key) for key in subject.new_keys(2)]):
            if not isinstance(verdict, ChunkNotFoundError):
                raise Breach(f"loading a chunk that was never stored: {told(verdict)}")


@check(says="Storing a key twice is harmless")
async def check_storing_twice_is_harmless(subject: TierSubject) -> None:
    """A key that is stored again succeeds again and holds one of the two objects."""
    async with subject.opened() as probe:
        key = await probe.put_one()
        if key is None:
            return
        (verdict,) = await probe.store([probe.full(key, version=1)])
        if verdict is not None:
            raise Breach(f"storing a key again: {told(verdict)}")
        await probe.expect(key, 0, 1)


@check(says="what to write; its buffers must not be changed.")
async def check_store_leaves_its_buffers_alone(subject: TierSubject) -> None:
    """A store changes nothing in the buffers that it reads."""
    async with subject.opened() as probe:
        lent = [probe.full(key) for key in subject.new_keys(3)]
        await probe.store(lent)
        if any(buffers.content != probe.content(buffers.key) for buffers in lent):
            raise Breach("after a store, the buffers hold something else")


@check(Hook.READ_RAW, Hook.WRITE_RAW, says="shorter or longer than the buffers")
async def check_another_length_is_corrupt(subject: TierSubject) -> None:
    """An object that was cut short, or is too long, is never taken for the chunk."""
    async with subject.opened() as probe:
        neighbour = await probe.put_one()
        for change in (lambda whole: whole[: len(whole) // 2], _without_last, _with_more):
            key = await probe.put_one()
            if key is None or neighbour is None:
                return
            whole = await subject.call(Hook.READ_RAW, key)
            if whole is None:
                raise Breach("a chunk was stored, and read_raw finds nothing under its key")
            await subject.call(Hook.WRITE_RAW, key, change(whole))
            lent = probe.empty(key)
            (verdict,) = await probe.load([lent])
            if lent.is_overrun:
                raise Breach("a load wrote outside of its buffers")
            if verdict is None:
                # One that has the whole chunk in a cache may give it.
                probe.judge(key, lent.content, [0])
            elif not is_miss(verdict):
                raise Breach(f"loading an object of another length: {told(verdict)}")
            # Whatever was left on the way to it, the tier goes on.
            await probe.expect(neighbour, 0)


@check(says="Its address and length are multiples of the tier's alignment.")
async def check_buffers_at_any_address(subject: TierSubject) -> None:
    """Buffers may lie at any address that the declared alignment allows."""
    alignment = subject.tier_class.alignment
    async with subject.opened() as probe:
        for shift_bytes in (alignment, 3 * alignment):
            for key in subject.new_keys(1):
                (verdict,) = await probe.store([probe.full(key, shift_bytes=shift_bytes)])
                if isinstance(verdict, TierCapacityError):
                    continue
                if verdict is not None:
                    raise Breach(
                        f"storing from an address {shift_bytes} behind a page: {told(verdict)}"
                    )
                lent = probe.empty(key, shift_bytes=shift_bytes)
                (verdict,) = await probe.load([lent])
                if verdict is not None:
                    raise Breach(
                        f"loading to an address {shift_bytes} behind a page: {told(verdict)}"
                    )
                probe.judge(key, lent.content, [0])


@check(says="length of a chunk's payload, before rounding up to the tier's alignment.")
async def check_chunks_of_any_length(subject: TierSubject) -> None:
    """A chunk may have any length; only the alignment that is declared is kept."""
    for chunk_bytes in _ODD_LENGTHS:
        # Chunks of another length are of another namespace.
        facts = {**subject.namespace.facts, "chunk_bytes": chunk_bytes}
        opened = subject.opened(chunk_bytes=chunk_bytes, namespace=Namespace(facts))
        async with opened as probe:
            key = await probe.put_one()
            if key is None:
                continue
            found = await probe.get(key)
            if isinstance(found, TierError):
                raise Breach(f"a chunk of {chunk_bytes} bytes cannot be loaded: {told(found)}")
            probe.judge(key, found, [0])


def _without_last(whole: bytes) -> bytes:
    return whole[:-1]


def _with_more(whole: bytes) -> bytes:
    return whole + b"\x00" * 1000
