from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import (
    CorruptChunkError,
    RequestContext,
    Transfer,
    make_offload_key,
    split_offload_key,
)


@given(st.binary(max_size=64), st.integers(0, 2**32 - 1))
def test_a_key_comes_apart_as_it_was_made(chain_hash: bytes, group_index: int) -> None:
    assert split_offload_key(make_offload_key(chain_hash, group_index)) == (chain_hash, group_index)


def test_the_group_index_is_four_bytes_big_endian_behind_the_hash() -> None:
    assert make_offload_key(b"hash", 0x01020304) == b"hash\x01\x02\x03\x04"
    assert make_offload_key(b"hash") == b"hash\0\0\0\0"


@pytest.mark.parametrize("group_index", [-1, 2**32])
def test_a_group_index_that_does_not_fit_is_refused(group_index: int) -> None:
    with pytest.raises(OverflowError):
        make_offload_key(b"hash", group_index)


class Seals:
    """Replaces the SDK's functions that seal and check a chunk, and records their calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes | None]] = []
        self.damage: CorruptChunkError | None = None

    def seal(self, key: bytes, header: object, payload: object, digest: bytes | None) -> None:
        self.asked.append(("seal", digest))

    def check(self, key: bytes, header: object, payload: object, digest: bytes | None) -> None:
        self.asked.append(("check", digest))
        if self.damage:
            raise self.damage


def make_transfer(seals: Seals | None = None) -> Transfer:
    header, payload = memoryview(bytearray(64)), memoryview(bytearray(100))
    unsealed = seals and seals.seal
    return Transfer(b"key", RequestContext("r"), header, payload, unsealed=unsealed)


def test_a_header_is_sealed_once_when_it_is_first_used() -> None:
    seals = Seals()
    transfer = make_transfer(seals)
    assert (transfer.object_bytes, len(transfer.payload), seals.asked) == (164, 100, [])
    assert transfer.buffers[0] is transfer.header
    transfer.seal(b"late")
    assert seals.asked == [("seal", None)]
    brought = make_transfer(seals)
    brought.seal(b"brought")
    assert brought.regions
    assert seals.asked[1:] == [("seal", b"brought")]


def test_a_chunk_is_verified_until_it_is_found_whole() -> None:
    seals = Seals()
    transfer = make_transfer()
    transfer.verify(b"nothing to check")
    transfer.unverified = seals.check
    seals.damage = CorruptChunkError("flipped")
    with pytest.raises(CorruptChunkError):
        transfer.verify()
    seals.damage = None
    for digest in (b"brought", None):
        transfer.verify(digest)
    assert transfer.buffers
    assert seals.asked == [("check", None), ("check", b"brought")]
