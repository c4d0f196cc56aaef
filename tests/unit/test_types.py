from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import RequestContext, Transfer, make_offload_key, split_offload_key


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


def test_a_transfer_is_its_header_then_its_payload() -> None:
    header, payload = memoryview(bytearray(64)), memoryview(bytearray(100))
    transfer = Transfer(b"key", RequestContext("r"), header, payload)
    assert transfer.buffers[0] is header
    assert transfer.buffers[1] is payload
    assert transfer.object_bytes == 164
