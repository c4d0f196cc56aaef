"""Checks of single chunks: a stored one is found and intact, an absent one is not found."""

from __future__ import annotations

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.probe import describe, is_miss
from kvtier_sdk.testing.conformance.rules import DECLINED, Breach, CheckSkipped, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject

_FOUND = "None once a later load will find the chunk."
_ODD_LENGTHS = (1, 63, 4095, 4097, 100_003)


@check(says=_FOUND)
async def check_what_is_stored_comes_back(subject: TierSubject) -> None:
    """A chunk whose store succeeded loads again, byte for byte."""
    async with subject.opened() as probe:
        for key in await probe.put(subject.new_keys(4)):
            await probe.expect(key, 0)


@check(says="One boolean per key, in the order of keys.")
async def check_lookup_tells_stored_from_absent(subject: TierSubject) -> None:
    """Lookup returns False for a chunk that was never stored, and True for one that was."""
    async with subject.opened() as probe:
        (absent,) = subject.new_keys(1)
        if await probe.lookup([absent]) != [False]:
            raise Breach("lookup returned True for a chunk that was never stored")
        stored = await probe.put_one()
        if stored is None:
            return
        if await probe.lookup([stored]) != [True]:
            raise Breach("lookup returned False for a chunk that has just been stored")
        if await probe.lookup([stored, absent]) == [True, True]:
            raise Breach(
                "asked for a stored chunk and one that was never stored, lookup returned True for "
                "both"
            )


@check(says="A missing object is a ChunkNotFoundError.")
async def check_absent_is_not_found(subject: TierSubject) -> None:
    """Loading a chunk that was never stored gives a ChunkNotFoundError."""
    async with subject.opened() as probe:
        for verdict in await probe.load([probe.empty(key) for key in subject.new_keys(2)]):
            if not isinstance(verdict, ChunkNotFoundError):
                raise Breach(f"loading a chunk that was never stored gave {describe(verdict)}")


@check(says="Storing a key twice is harmless")
async def check_storing_twice_is_harmless(subject: TierSubject) -> None:
    """Storing a key again succeeds, and one of the two objects stays, whole."""
    async with subject.opened() as probe:
        key = await probe.put_one()
        if key is None:
            return
        (verdict,) = await probe.store([probe.full(key, version=1)])
        if verdict is not None:
            raise Breach(f"storing a key again gave {describe(verdict)}")
        await probe.expect(key, 0, 1)


@check(says="The last one stays if its transfer's replace is true.")
async def check_a_store_replaces_on_demand(subject: TierSubject) -> None:
    """A store whose transfer says so writes over what is under its key."""
    async with subject.opened() as probe:
        key = await probe.put_one()
        if key is None:
            return
        (verdict,) = await probe.store([probe.full(key, version=1, replace=True)])
        if verdict is not None:
            raise Breach(f"replacing a chunk gave {describe(verdict)}")
        await probe.expect(key, 1)


@check(says="the chunks to write; their buffers must not be modified.")
async def check_store_leaves_its_buffers_alone(subject: TierSubject) -> None:
    """A store does not modify the buffers that it reads."""
    async with subject.opened() as probe:
        lent = [probe.full(key) for key in subject.new_keys(3)]
        await probe.store(lent)
        if any(buffers.content != probe.content(buffers.key) for buffers in lent):
            raise Breach("a store modified the buffers that it was given")


@check(
    Hook.READ_RAW,
    Hook.WRITE_RAW,
    says="An object shorter or longer than the buffers is a CorruptChunkError.",
)
async def check_another_length_is_corrupt(subject: TierSubject) -> None:
    """An object that is too short or too long never loads as the chunk."""
    async with subject.opened() as probe:
        neighbour = await probe.put_one()
        written = 0
        for change in (lambda whole: whole[: len(whole) // 2], _without_last, _with_more):
            key = await probe.put_one()
            if key is None or neighbour is None:
                return
            whole = await subject.call(Hook.READ_RAW, key)
            if whole is None:
                raise Breach("a chunk was stored, but read_raw finds nothing under its key")
            if await subject.call(Hook.WRITE_RAW, key, change(whole)) is False:
                continue
            written += 1
            lent = probe.empty(key)
            (verdict,) = await probe.load([lent])
            if lent.is_overrun:
                raise Breach("a load wrote outside of its buffers")
            if verdict is None:
                # A tier that has the whole chunk in a cache may return it.
                probe.check_content(key, lent.content, [0])
            elif not is_miss(verdict):
                raise Breach(f"loading an object of another length gave {describe(verdict)}")
            # The wrong length must not confuse later calls.
            await probe.expect(neighbour, 0)
        if not written:
            raise CheckSkipped(DECLINED)


@check(Hook.LOSE_PART, says="True if load_chunk would find it.")
async def check_a_lost_part_is_a_miss(subject: TierSubject) -> None:
    """A chunk of which a part is lost is absent, until a store makes it whole again."""
    async with subject.opened() as probe:
        neighbour = await probe.put_one()
        key = await probe.put_one()
        if key is None or neighbour is None:
            return
        await subject.call(Hook.LOSE_PART, key)
        lent = probe.empty(key)
        (verdict,) = await probe.load([lent])
        if verdict is None:
            # A tier may have a copy of the part, or restore it.
            probe.check_content(key, lent.content, [0])
        elif not is_miss(verdict):
            raise Breach(f"loading a chunk of which a part is lost gave {describe(verdict)}")
        elif await probe.lookup([key]) != [False]:
            raise Breach("lookup returned True for a chunk of which a part is lost")
        await probe.expect(neighbour, 0)
        (verdict,) = await probe.store([probe.full(key, version=1, replace=True)])
        if verdict is not None:
            raise Breach(f"storing a chunk of which a part is lost gave {describe(verdict)}")
        await probe.expect(key, 1)


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
                        f"storing from an address {shift_bytes} bytes into a page gave "
                        f"{describe(verdict)}"
                    )
                lent = probe.empty(key, shift_bytes=shift_bytes)
                (verdict,) = await probe.load([lent])
                if verdict is not None:
                    raise Breach(
                        f"loading to an address {shift_bytes} bytes into a page gave "
                        f"{describe(verdict)}"
                    )
                probe.check_content(key, lent.content, [0])


@check(says="length of a chunk's payload, before rounding up to the tier's alignment.")
async def check_chunks_of_any_length(subject: TierSubject) -> None:
    """A chunk may have any length, rounded up to the declared alignment and to nothing else."""
    for chunk_bytes in _ODD_LENGTHS:
        # Chunks of another length belong to another namespace.
        facts = {**subject.namespace.facts, "chunk_bytes": chunk_bytes}
        opened = subject.opened(chunk_bytes=chunk_bytes, namespace=Namespace(facts))
        async with opened as probe:
            key = await probe.put_one()
            if key is None:
                continue
            found = await probe.get(key)
            if isinstance(found, TierError):
                raise Breach(f"loading a chunk of {chunk_bytes} bytes gave {describe(found)}")
            probe.check_content(key, found, [0])


def _without_last(whole: bytes) -> bytes:
    return whole[:-1]


def _with_more(whole: bytes) -> bytes:
    return whole + b"\x00" * 1000
