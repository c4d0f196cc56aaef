"""Checks that no chunk is found in another's place."""

from __future__ import annotations

from kvtier_sdk.errors import TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.testing.conformance.probe import Probe, describe, is_miss
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import OffloadKey, make_offload_key

_APART = "a chunk is found under its own key in its own namespace, and nowhere else."
#: Chunks stored at a time: few, so that a small tier has room.
_AT_ONCE = 4


@check(says=_APART)
async def check_groups_are_apart(subject: TierSubject) -> None:
    """Keys that differ only in their KV-cache group are different chunks."""
    chain_hash = subject.new_hash()
    async with subject.opened() as probe:
        await _check_apart(probe, [make_offload_key(chain_hash, group) for group in range(3)])
        await _check_apart(probe, [make_offload_key(chain_hash, 1 << bits) for bits in (8, 24, 31)])


@check(says=_APART)
async def check_similar_keys_are_apart(subject: TierSubject) -> None:
    """Keys that begin alike, or differ only in case, are different chunks."""
    start = subject.new_hash()
    begins = [start[:length] for length in (8, 16, 31, 32)]
    cases = [start[:8] + tail for tail in (b"name", b"Name", b"NAME")]
    tails = [start[:8] + tail for tail in (b"tail", b"tail\x00", b"tail\n")]
    async with subject.opened() as probe:
        for alike in (begins, cases, tails):
            await _check_apart(probe, [make_offload_key(chain_hash) for chain_hash in alike])


@check(says="A key may hold any bytes")
async def check_keys_of_any_bytes(subject: TierSubject) -> None:
    """Every byte value may appear anywhere in a key."""
    salt = subject.new_hash()[:8]
    everything = bytes(range(256))
    keys = [salt + everything[at : at + 24] + salt for at in range(0, 256, 24)] + [
        text + salt + text for text in (b"\r\n", b"/../", b"{}*?[", b"%00", b"'\";--", b"\xff\x00")
    ]
    async with subject.opened() as probe:
        for at in range(0, len(keys), _AT_ONCE):
            await _check_apart(probe, keys[at : at + _AT_ONCE])


@check(says=_APART)
async def check_namespaces_are_apart(subject: TierSubject) -> None:
    """A chunk of one namespace is not found in another."""
    elsewhere = Namespace({**subject.namespace.facts, "dtype": "another"})
    async with subject.opened() as probe, subject.opened(namespace=elsewhere) as other:
        key = await probe.put_one()
        if key is None:
            return
        if await other.lookup([key]) != [False]:
            raise Breach("lookup finds a chunk that was stored in another namespace")
        found = await other.get(key)
        if not isinstance(found, TierError) or not is_miss(found):
            what = describe(found) if isinstance(found, TierError) else "success"
            raise Breach(f"loading a chunk that was stored in another namespace gave {what}")
        if await other.put([key], version=1):
            await other.expect(key, 1)
        await probe.expect(key, 0)


async def _check_apart(probe: Probe, keys: list[OffloadKey]) -> None:
    """Store chunks one by one: none may load before its own store, and all must load at the end."""
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
