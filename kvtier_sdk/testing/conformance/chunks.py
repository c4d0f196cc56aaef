"""Checks of single chunks and of batches."""

from __future__ import annotations

from kvtier_sdk.errors import ChunkNotFoundError, TierCapacityError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.probe import Probe, describe, is_miss
from kvtier_sdk.testing.conformance.rules import (
    DECLINED,
    Breach,
    CheckSkipped,
    Hook,
    check,
    check_opened,
)
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability, OffloadKey, make_offload_key

_ODD_LENGTHS = (1, 63, 4095, 4097, 100_003)
_APART = "a chunk is found only under its own key in its own namespace."
#: The number of chunks to store at a time. It is small, because a tier may lack room for more.
_AT_ONCE = 4
_LENGTH = "Results have the order and the length of the batch."
_BIG_BATCH = 1024


@check_opened(says="None if later calls of load find the chunk.")
async def check_what_is_stored_comes_back(subject: TierSubject, probe: Probe) -> None:
    """A chunk whose store succeeded loads again, byte for byte."""
    for key in await probe.put(subject.new_keys(4)):
        await probe.expect(key, 0)


@check_opened(says="One boolean per key, in the order of keys")
async def check_lookup_tells_stored_from_absent(subject: TierSubject, probe: Probe) -> None:
    """Lookup returns True for a stored chunk, and False for a chunk that was never stored."""
    (absent,) = subject.new_keys(1)
    if await probe.lookup([absent]) != [False]:
        raise Breach("lookup returned True for a chunk that was never stored")
    stored = await probe.put_one()
    if await probe.lookup([stored]) != [True]:
        raise Breach("lookup returned False for a chunk that has just been stored")
    if await probe.lookup([stored, absent]) == [True, True]:
        raise Breach("of a stored chunk and an absent one, lookup returned True for both")


@check_opened(says="A missing object is a ChunkNotFoundError.")
async def check_absent_is_not_found(subject: TierSubject, probe: Probe) -> None:
    """Loading a chunk that was never stored fails with a ChunkNotFoundError."""
    for verdict in await probe.load([probe.empty(key) for key in subject.new_keys(2)]):
        if not isinstance(verdict, ChunkNotFoundError):
            raise Breach(f"loading a chunk that was never stored gave {describe(verdict)}")


@check_opened(says="computed from the bytes as they are in the payload now.")
async def check_a_brought_digest_is_right(subject: TierSubject, probe: Probe) -> None:
    """A digest that the tier supplies matches the payload, even if the payload is damaged."""
    for object_bytes in probe.object_lengths():
        (key,) = subject.new_keys(1)
        stored, loaded = probe.full(key, object_bytes=object_bytes), probe.empty(key)
        await probe.store([stored])
        if subject.has(Hook.READ_RAW) and subject.has(Hook.WRITE_RAW):
            whole = await subject.call(Hook.READ_RAW, key)
            if whole:
                await subject.call(Hook.WRITE_RAW, key, whole[:-1] + bytes([whole[-1] ^ 1]))
        await probe.load([loaded])
        if stored.wrong_digests or loaded.wrong_digests:
            raise Breach("the tier brought a digest that is not the payload's")


@check_opened(says="Storing a key twice is harmless")
async def check_storing_twice_is_harmless(subject: TierSubject, probe: Probe) -> None:
    """Storing a key again succeeds, and leaves one of the two objects intact."""
    key = await probe.put_one()
    await _store_again(probe, key, "storing a key again")
    await probe.expect(key, 0, 1)


@check_opened(says="If the last transfer's replace is true, the tier keeps the last object.")
async def check_a_store_replaces_on_demand(subject: TierSubject, probe: Probe) -> None:
    """A store that demands a replacement overwrites the object under its key."""
    key = await probe.put_one()
    await _store_again(probe, key, "replacing a chunk", replace=True)
    await probe.expect(key, 1)


@check_opened(says="the chunks to write; their buffers must not be modified.")
async def check_store_leaves_its_buffers_alone(subject: TierSubject, probe: Probe) -> None:
    """A store does not modify the buffers that it reads."""
    lent = [probe.full(key) for key in subject.new_keys(3)]
    await probe.store(lent)
    if any(buffers.content != probe.content(buffers.key) for buffers in lent):
        raise Breach("a store modified the buffers that it was given")


@check_opened(says="Report the length of a loaded object, once the object is in the buffers.")
async def check_objects_of_any_length(subject: TierSubject, probe: Probe) -> None:
    """An object shorter than the buffers is loaded in full, and the tier reports its length."""
    if subject.tier_class.fixed_length:
        raise CheckSkipped("fixed_length is declared")
    lengths = probe.object_lengths()
    objects: dict[OffloadKey, list[bytes]] = {key: [] for key in subject.new_keys(len(lengths))}
    for version in range(len(lengths)):
        # Replace each object with an object of another length.
        lengths = [*lengths[1:], lengths[0]]
        kept = await probe.put(objects, version, object_lengths=lengths, replace=version > 0)
        for key, object_bytes in zip(objects, lengths, strict=True):
            objects[key].append(probe.content(key, version, object_bytes))
        batch = [probe.empty(key) for key in kept]
        for lent, verdict in zip(batch, await probe.load(batch), strict=True):
            if verdict is not None:
                raise Breach(f"loading a stored chunk gave {describe(verdict)}")
            _check_arrival(probe, lent.content, objects[lent.key])


def _check_arrival(probe: Probe, found: bytes, stored: list[bytes]) -> None:
    """Require that ``found`` is one of the ``stored`` objects, not necessarily the last."""
    *earlier, last = stored
    if found not in stored and found.startswith(last):
        if any(found == last + longer[len(last) :] for longer in earlier):
            raise Breach("an object is followed by the end of the longer one that it replaced")
        raise Breach(
            f"an object of {len(last)} bytes was loaded as one of {len(found)}; the tier must call "
            "transfer.received(object_bytes), or fill the buffers with transfer.fill(stored)"
        )
    probe.check_found(found, stored)


@check_opened(
    Hook.READ_RAW,
    Hook.WRITE_RAW,
    says="An object that does not fit into the buffers is a CorruptChunkError",
)
async def check_another_length_is_corrupt(subject: TierSubject, probe: Probe) -> None:
    """An object that was cut off or extended never loads as the whole chunk."""
    neighbour = await probe.put_one()
    written = 0
    for change in range(3):
        key = await probe.put_one()
        whole = await subject.call(Hook.READ_RAW, key)
        if whole is None:
            raise Breach("a chunk was stored, but read_raw finds nothing under its key")
        changed = (whole[: len(whole) // 2], whole[:-1], whole + bytes(1000))[change]
        if await subject.call(Hook.WRITE_RAW, key, changed) is False:
            continue
        written += 1
        lent = probe.empty(key)
        (verdict,) = await probe.load([lent])
        if lent.is_overrun:
            raise Breach("a load wrote outside of its buffers")
        if verdict is None:
            # A tier may load a truncated object and report its length, because the header's
            # check finds the missing part. A tier that caches the whole chunk may return it.
            probe.check_found(lent.content, [probe.content(key), changed])
        elif not is_miss(verdict):
            raise Breach(f"loading an object of another length gave {describe(verdict)}")
        # The wrong length must not affect later calls, for example on the same connection.
        await probe.expect(neighbour, 0)
    if not written:
        raise CheckSkipped(DECLINED)


@check_opened(Hook.LOSE_PART, says="Return true if load_chunk would find a chunk under key.")
async def check_a_lost_part_is_a_miss(subject: TierSubject, probe: Probe) -> None:
    """A chunk that has lost a part is absent until it is stored again."""
    neighbour = await probe.put_one()
    key = await probe.put_one()
    await subject.call(Hook.LOSE_PART, key)
    what = "a chunk of which a part is lost"
    # The chunk may still be whole, because the tier may have another copy of the lost part.
    is_whole = await probe.expect(key, 0, may_miss=True, what=what)
    if not is_whole and await probe.lookup([key]) != [False]:
        raise Breach("lookup returned True for a chunk of which a part is lost")
    await probe.expect(neighbour, 0)
    await _store_again(probe, key, "storing a chunk that has lost a part", replace=True)
    await probe.expect(key, 1)


@check_opened(says="Its address and length fit the tier's alignment.")
async def check_buffers_at_any_address(subject: TierSubject, probe: Probe) -> None:
    """Buffers may lie at any address that the declared alignment allows."""
    alignment = subject.tier_class.alignment
    for shift_bytes in (alignment, 3 * alignment):
        where = f"an address {shift_bytes} bytes into a page"
        (key,) = subject.new_keys(1)
        (verdict,) = await probe.store([probe.full(key, shift_bytes=shift_bytes)])
        if isinstance(verdict, TierCapacityError):
            continue
        if verdict is not None:
            raise Breach(f"storing from {where} gave {describe(verdict)}")
        await probe.expect(key, 0, what=f"to {where}", shift_bytes=shift_bytes)


@check(says="length of a chunk, before rounding up to the tier's alignment.")
async def check_chunks_of_any_length(subject: TierSubject) -> None:
    """A chunk may have any length, rounded up only to the declared alignment."""
    for chunk_bytes in _ODD_LENGTHS:
        async with subject.opened(chunk_bytes=chunk_bytes) as probe:
            for key in await probe.put(subject.new_keys(1)):
                await probe.expect(key, 0, what=f"a chunk of {chunk_bytes} bytes")


async def _store_again(probe: Probe, key: OffloadKey, what: str, *, replace: bool = False) -> None:
    (verdict,) = await probe.store([probe.full(key, version=1, replace=replace)])
    if verdict is not None:
        raise Breach(f"{what} gave {describe(verdict)}")


@check_opened(says=_APART)
async def check_groups_are_apart(subject: TierSubject, probe: Probe) -> None:
    """Keys that differ only in their KV-cache group are different chunks."""
    chain_hash = subject.new_hash()
    await _check_apart(probe, [make_offload_key(chain_hash, group) for group in range(3)])
    await _check_apart(probe, [make_offload_key(chain_hash, 1 << bits) for bits in (8, 24, 31)])


@check_opened(says=_APART)
async def check_similar_keys_are_apart(subject: TierSubject, probe: Probe) -> None:
    """Keys that begin alike, or differ only in case, are different chunks."""
    start = subject.new_hash()
    begins = [start[:length] for length in (8, 16, 31, 32)]
    cases = [start[:8] + tail for tail in (b"name", b"Name", b"NAME")]
    tails = [start[:8] + tail for tail in (b"tail", b"tail\x00", b"tail\n")]
    for alike in (begins, cases, tails):
        await _check_apart(probe, [make_offload_key(chain_hash) for chain_hash in alike])


@check_opened(says="A key may hold any bytes")
async def check_keys_of_any_bytes(subject: TierSubject, probe: Probe) -> None:
    """Every byte value may appear anywhere in a key."""
    salt = subject.new_hash()[:8]
    everything = bytes(range(256))
    keys = [salt + everything[at : at + 24] + salt for at in range(0, 256, 24)] + [
        text + salt + text for text in (b"\r\n", b"/../", b"{}*?[", b"%00", b"'\";--", b"\xff\x00")
    ]
    for at in range(0, len(keys), _AT_ONCE):
        await _check_apart(probe, keys[at : at + _AT_ONCE])


@check(says=_APART)
async def check_namespaces_are_apart(subject: TierSubject) -> None:
    """A chunk of one namespace is not found in another."""
    elsewhere = Namespace({**subject.namespace.facts, "dtype": "another"})
    async with subject.opened() as probe, subject.opened(namespace=elsewhere) as other:
        key = await probe.put_one()
        if await other.lookup([key]) != [False]:
            raise Breach("lookup finds a chunk that was stored in another namespace")
        found = await other.get(key)
        if isinstance(found, bytes) or not is_miss(found):
            what = describe(found)
            raise Breach(f"loading a chunk that was stored in another namespace gave {what}")
        if await other.put([key], version=1):
            await other.expect(key, 1)
        await probe.expect(key, 0)


async def _check_apart(probe: Probe, keys: list[OffloadKey]) -> None:
    """Require that each chunk is absent until stored, and that all chunks load at the end."""
    kept: list[OffloadKey] = []
    for key in keys:
        found = await probe.get(key)
        if not isinstance(found, TierError):
            other = next((old for old in kept if found == probe.content(old)), None)
            whose = f"of {other.hex()}" if other is not None else "of another chunk"
            raise Breach(f"loading {key.hex()}, which was never stored, gave the bytes {whose}")
        kept += await probe.put([key])
    for key in kept:
        found = await probe.get(key)
        for old in kept:
            if old != key and found == probe.content(old):
                raise Breach(f"loading {key.hex()} gave the bytes of {old.hex()}")
        await probe.expect(key, 0)


@check_opened(says=_LENGTH)
async def check_results_have_the_length_of_the_batch(subject: TierSubject, probe: Probe) -> None:
    """Every batch gets one result per chunk."""
    for count in range(1, 8):
        keys = subject.new_keys(count)
        await probe.lookup(keys)
        await probe.store([probe.full(key) for key in keys])
        await probe.load([probe.empty(key) for key in keys])


@check_opened(says=_LENGTH)
async def check_an_empty_batch_is_no_results(subject: TierSubject, probe: Probe) -> None:
    """An empty batch gets no results."""
    await probe.lookup([])
    for verdicts in (await probe.store([]), await probe.load([])):
        if verdicts:
            raise Breach(f"an empty batch got {len(verdicts)} verdicts")
    if Capability.DELETE in subject.tier_class.capabilities:
        await probe.bounded(probe.tier.delete([]), "delete")
    if Capability.TOUCH in subject.tier_class.capabilities:
        await probe.bounded(probe.tier.touch([]), "touch")


@check_opened(says=_LENGTH)
async def check_results_have_the_order_of_the_batch(subject: TierSubject, probe: Probe) -> None:
    """The results have the same order as the chunks of the batch."""
    stored = await probe.put(subject.new_keys(3))
    absent = subject.new_keys(1)
    batch = stored[:1] + absent + stored[1:]
    expected = [key in stored for key in batch]
    answers = await probe.lookup(batch)
    # Judge only the order, because other checks find wrong answers.
    if answers != expected and sorted(answers) == sorted(expected):
        raise Breach(f"lookup should return {expected}; it returned {answers}")
    lent = [probe.empty(key) for key in batch]
    loaded = [verdict is None for verdict in await probe.load(lent)]
    if loaded != expected and sorted(loaded) == sorted(expected):
        raise Breach(
            f"load should succeed for these chunks of a batch: {expected}; it did for {loaded}"
        )


@check_opened(says="a returned TierError means that this one chunk failed.")
async def check_one_failure_fails_alone(subject: TierSubject, probe: Probe) -> None:
    """A chunk that cannot be loaded does not affect the other chunks of its batch."""
    first, third = await probe.put_all(2)
    lent = [probe.empty(key) for key in (first, *subject.new_keys(1), third)]
    verdicts = await probe.load(lent)
    for at in (0, 2):
        if verdicts[at] is not None:
            raise Breach(
                "of a batch of three only the second chunk is absent, but loading another one "
                f"gave {describe(verdicts[at])}"
            )
        probe.check_content(lent[at].key, lent[at].content, [0])


@check_opened(says=_LENGTH)
async def check_big_batches(subject: TierSubject, probe: Probe) -> None:
    """A batch may hold a thousand chunks."""
    stored = await probe.put(subject.new_keys(1))
    keys = [*subject.new_keys(_BIG_BATCH - 1), *stored]
    answers = await probe.lookup(keys)
    if stored and not any(answers):
        raise Breach(f"in a batch of {len(keys)} keys, lookup did not find the stored one")
    for verdict in await probe.load([probe.empty(key) for key in keys]):
        if verdict is not None and not is_miss(verdict):
            raise Breach(f"loading a batch of {len(keys)} chunks gave {describe(verdict)}")


@check_opened(Hook.WRITE_RAW, says="Raise only TierError and its subclasses")
async def check_only_tier_errors_are_raised(subject: TierSubject, probe: Probe) -> None:
    """The tier raises only TierErrors, whatever the store contains."""
    written = 0
    for content in (b"", b"\x00", b"not a chunk at all\r\n", b"\xff" * probe.object_bytes):
        (key,) = subject.new_keys(1)
        is_stored = bool(await probe.put([key]))
        if not is_stored or await subject.call(Hook.WRITE_RAW, key, content) is False:
            continue
        written += 1
        # Ignore the answers. Both calls turn any error other than a TierError into a breach.
        await probe.get(key)
        await probe.lookup([key])
    if subject.keeps_chunks and not written:
        raise CheckSkipped(DECLINED)
