"""Checks of the results of a batch: their number, their order, and one failure among them."""

from __future__ import annotations

from kvtier_sdk.testing.conformance.probe import describe, is_miss
from kvtier_sdk.testing.conformance.rules import DECLINED, Breach, CheckSkipped, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability

_LENGTH = "Results have the order and the length of the batch."
_BIG_BATCH = 1024


@check(says=_LENGTH)
async def check_results_have_the_length_of_the_batch(subject: TierSubject) -> None:
    """Every batch gets one result per chunk."""
    async with subject.opened() as probe:
        for count in range(1, 8):
            keys = subject.new_keys(count)
            await probe.lookup(keys)
            await probe.store([probe.full(key) for key in keys])
            await probe.load([probe.empty(key) for key in keys])


@check(says=_LENGTH)
async def check_an_empty_batch_is_no_results(subject: TierSubject) -> None:
    """An empty batch gets no results."""
    async with subject.opened() as probe:
        await probe.lookup([])
        for verdicts in (await probe.store([]), await probe.load([])):
            if verdicts:
                raise Breach(f"an empty batch got {len(verdicts)} verdicts")
        if Capability.DELETE in subject.tier_class.capabilities:
            await probe.bounded(probe.tier.delete([]), "delete")
        if Capability.TOUCH in subject.tier_class.capabilities:
            await probe.bounded(probe.tier.touch([]), "touch")


@check(says=_LENGTH)
async def check_results_have_the_order_of_the_batch(subject: TierSubject) -> None:
    """Each result stands at the position of its chunk in the batch."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(3))
        absent = subject.new_keys(1)
        batch = stored[:1] + absent + stored[1:]
        expected = [key in stored for key in batch]
        answers = await probe.lookup(batch)
        # The right answers in the wrong order; other checks find wrong answers.
        if answers != expected and sorted(answers) == sorted(expected):
            raise Breach(f"lookup should return {expected}; it returned {answers}")
        lent = [probe.empty(key) for key in batch]
        loaded = [verdict is None for verdict in await probe.load(lent)]
        if loaded != expected and sorted(loaded) == sorted(expected):
            raise Breach(
                f"load should succeed for these chunks of a batch: {expected}; it did for {loaded}"
            )


@check(says="a TierError says why that one chunk failed.")
async def check_one_failure_fails_alone(subject: TierSubject) -> None:
    """A chunk that cannot be loaded does not fail the others of its batch."""
    async with subject.opened() as probe:
        kept = await probe.put(subject.new_keys(2))
        if len(kept) < 2:
            return
        lent = [probe.empty(key) for key in (kept[0], *subject.new_keys(1), kept[1])]
        verdicts = await probe.load(lent)
        for at in (0, 2):
            if verdicts[at] is not None:
                raise Breach(
                    "of a batch of three only the second chunk is absent, but loading another one "
                    f"gave {describe(verdicts[at])}"
                )
            probe.check_content(lent[at].key, lent[at].content, [0])


@check(says=_LENGTH)
async def check_big_batches(subject: TierSubject) -> None:
    """A batch may hold a thousand chunks."""
    async with subject.opened() as probe:
        stored = await probe.put(subject.new_keys(1))
        keys = [*subject.new_keys(_BIG_BATCH - 1), *stored]
        answers = await probe.lookup(keys)
        if stored and not any(answers):
            raise Breach(f"in a batch of {len(keys)} keys, lookup did not find the stored one")
        for verdict in await probe.load([probe.empty(key) for key in keys]):
            if verdict is not None and not is_miss(verdict):
                raise Breach(f"loading a batch of {len(keys)} chunks gave {describe(verdict)}")


@check(Hook.WRITE_RAW, says="Only TierError and its subclasses are raised")
async def check_only_tier_errors_are_raised(subject: TierSubject) -> None:
    """No content of the store makes a tier raise anything but a TierError."""
    async with subject.opened() as probe:
        written = 0
        for content in (b"", b"\x00", b"not a chunk at all\r\n", b"\xff" * probe.object_bytes):
            key = await probe.put_one()
            if key is None:
                continue
            if await subject.call(Hook.WRITE_RAW, key, content) is False:
                continue
            written += 1
            # Both raise a breach for any error but a TierError. Other checks judge the answers.
            await probe.get(key)
            await probe.lookup([key])
        if subject.keeps_chunks and not written:
            raise CheckSkipped(DECLINED)
