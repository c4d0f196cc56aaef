from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import CorruptChunkError, Namespace
from kvtier_sdk.chunk_header import HEADER_VERSION, ChunkHeader, header_bytes

CHUNK_BYTES = 96
KEY = b"hash\0\0\0\0"
FINGERPRINT = Namespace({"model": "m"}).fingerprint
CONTENT = bytes(range(CHUNK_BYTES))
HEADER = ChunkHeader(FINGERPRINT, CHUNK_BYTES)
# A chunk of 96 bytes has a payload of 128 bytes here.
PADDED = ChunkHeader(FINGERPRINT, CHUNK_BYTES, alignment=64)


def sealed(
    *,
    chunk_header: ChunkHeader = HEADER,
    header_length: int = 64,
    content: bytes = CONTENT,
    padding: bytes = b"",
) -> tuple[bytearray, bytearray]:
    header, payload = bytearray(b"\xff" * header_length), bytearray(content + padding)
    chunk_header.seal(KEY, memoryview(header), memoryview(payload))
    return header, payload


def check(
    header: bytes | bytearray,
    payload: bytes | bytearray,
    *,
    chunk_header: ChunkHeader = HEADER,
    key: bytes = KEY,
) -> None:
    chunk_header.check(key, memoryview(header), memoryview(payload))


def hand_built(**changes: object) -> bytes:
    """Build a header as the module's docstring describes, without the module's code."""
    fields: dict[str, object] = {
        "magic": b"KVTC",
        "version": 2,
        "flags": 0,
        "header_length": 64,
        "chunk_length": CHUNK_BYTES,
        "payload_length": CHUNK_BYTES,
        "binding": xxhash.xxh3_128(FINGERPRINT.encode() + KEY).digest(),
        "digest": xxhash.xxh3_128(CONTENT).digest(),
    }
    packed = struct.pack("<4sBBHQQ16s16s", *(fields | changes).values())
    return packed + struct.pack("<Q", xxhash.xxh3_64(packed).intdigest())


def test_the_header_is_the_documented_one() -> None:
    header, _ = sealed()
    assert HEADER_VERSION == 2
    assert bytes(header) == hand_built()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"ELSE"}, "does not begin with a kvtier header"),
        ({"version": 1}, "format version 1; this release reads 2"),
        ({"flags": 1}, "flags 1; expected 0"),
        ({"flags": 4}, "flags 4; expected 0"),
        ({"header_length": 4096}, "header of 4096 bytes; expected 64"),
        ({"chunk_length": 95}, "chunk of 95 bytes; expected 96"),
        ({"flags": 2, "payload_length": 95}, "payload of 96 bytes; expected 95"),
        ({"flags": 2}, "compressed payload of 96 bytes; expected fewer"),
        ({"binding": bytes(16)}, "another key or namespace"),
        ({"digest": bytes(16)}, "does not match its digest"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptChunkError, match=message):
        check(hand_built(**changes), CONTENT)


@given(st.binary(min_size=CHUNK_BYTES, max_size=CHUNK_BYTES), st.binary(min_size=32, max_size=32))
def test_what_was_sealed_is_accepted(content: bytes, padding: bytes) -> None:
    check(*sealed(content=content))
    check(*sealed(content=content, padding=padding, chunk_header=PADDED), chunk_header=PADDED)


@given(st.binary(min_size=64, max_size=64), st.integers(0, 128))
def test_a_shorter_payload_is_marked_and_accepted_at_its_own_length_only(
    content: bytes, read_bytes: int
) -> None:
    header, payload = sealed(content=content, chunk_header=PADDED)
    check(header, payload, chunk_header=PADDED)
    if read_bytes != 64:
        with pytest.raises(CorruptChunkError, match=f"payload of {read_bytes} bytes; expected 64"):
            check(header, payload.ljust(128, b"\0")[:read_bytes], chunk_header=PADDED)


def test_any_flipped_bit_of_the_header_is_found() -> None:
    for bit in range(64 * 8):
        header, payload = sealed()
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunkError):
            check(header, payload)


def test_a_padded_header_says_its_own_length_and_is_zero_behind_its_fields() -> None:
    header, payload = sealed(header_length=4096)
    assert bytes(header) == hand_built(header_length=4096) + bytes(4096 - 64)
    check(header, payload)
    with pytest.raises(CorruptChunkError, match="header of 4096 bytes; expected 64"):
        check(header[:64], payload)


def test_padding_behind_the_payload_is_not_looked_at() -> None:
    header, payload = sealed(padding=b"\0" * 32, chunk_header=PADDED)
    payload[-1] = 0xFF
    check(header, payload, chunk_header=PADDED)


def test_without_verification_nothing_is_checked() -> None:
    unverified = ChunkHeader(FINGERPRINT, CHUNK_BYTES, verify=False)
    check(bytes(64), bytes(CHUNK_BYTES), chunk_header=unverified)
    check(b"\xff" * 64, b"", chunk_header=unverified, key=b"any")


def test_a_header_is_64_bytes_rounded_up_to_the_alignment() -> None:
    lengths = [header_bytes(alignment) for alignment in (1, 64, 128, 512, 4096)]
    assert lengths == [64, 64, 128, 512, 4096]
