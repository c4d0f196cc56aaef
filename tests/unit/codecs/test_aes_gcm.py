from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.author import run
from support.keys import NEXT, OURS, THEIRS, write_keys

from kvtier_sdk import ChunkAuthError, ChunkCodec, load_codec

ASSOCIATED = b"header, namespace and key"
CONTENT = bytes(range(256)) * 3

Make = Callable[..., ChunkCodec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(*keys: bytes) -> ChunkCodec:
        return load_codec(write_keys(tmp_path / "chunk.keys", *keys))

    return build


def seal(
    codec: ChunkCodec, content: bytes = CONTENT, associated: bytes = ASSOCIATED
) -> tuple[bytes, bytes]:
    envelope, sealed = bytearray(codec.envelope_bytes), bytearray(len(content))
    codec.seal(associated, memoryview(content), memoryview(sealed), memoryview(envelope))
    return bytes(envelope), bytes(sealed)


def unseal(
    codec: ChunkCodec, envelope: bytes, sealed: bytes, associated: bytes = ASSOCIATED
) -> bytes:
    payload = bytearray(len(sealed))
    codec.open(associated, memoryview(envelope), memoryview(sealed), memoryview(payload))
    return bytes(payload)


def hand_opened(key: bytes, envelope: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Decrypt a chunk as the module's docstring describes, without the module's code."""
    assert envelope[:8] == hmac.digest(key, b"kvtier aes-gcm key id\x01", hashlib.sha256)[:8]
    info = b"kvtier aes-gcm chunk" + envelope[8:32] + b"\x01"
    chunk_key = hmac.digest(key, info, hashlib.sha256)
    return AESGCM(chunk_key).decrypt(bytes(12), sealed + envelope[32:], associated)


def test_the_encoding_is_the_documented_one(make: Make) -> None:
    envelope, sealed = seal(make(OURS))
    assert len(envelope) == 48
    assert hand_opened(OURS, envelope, sealed, ASSOCIATED) == CONTENT


@given(st.binary(max_size=5000), st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_sealed_is_opened(make: Make, content: bytes, associated: bytes) -> None:
    codec = make(OURS)
    assert unseal(codec, *seal(codec, content, associated), associated) == content


def test_no_two_seals_are_alike_and_none_shows_the_content(make: Make) -> None:
    codec = make(OURS)
    (first, one), (second, other) = seal(codec), seal(codec)
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert one != other
    assert CONTENT[:16] not in one + first


@pytest.mark.parametrize("part", ["envelope", "sealed", "associated"])
def test_any_flipped_bit_is_found(make: Make, part: str) -> None:
    codec = make(OURS)
    envelope, sealed = seal(codec, CONTENT[:48])
    parts = {"envelope": envelope, "sealed": sealed, "associated": ASSOCIATED}
    for bit in range(8 * len(parts[part])):
        flipped = bytearray(parts[part])
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkAuthError) as caught:
            unseal(codec, **(parts | {part: bytes(flipped)}))
        is_key_id = part == "envelope" and bit < 64
        assert caught.value.unknown_key is is_key_id


@given(st.binary(min_size=48, max_size=48), st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_anybody_makes_up_is_refused(make: Make, envelope: bytes, sealed: bytes) -> None:
    codec = make(OURS)
    own_id = seal(codec)[0][:8]
    for made_up in (envelope, own_id + envelope[8:]):
        with pytest.raises(ChunkAuthError):
            unseal(codec, made_up, sealed)


def test_a_key_that_is_not_in_the_file_is_named_by_its_id(make: Make) -> None:
    envelope, sealed = seal(make(THEIRS))
    with pytest.raises(ChunkAuthError, match=f"sealed with key {envelope[:8].hex()}") as caught:
        unseal(make(OURS), envelope, sealed)
    assert caught.value.unknown_key


def test_keys_are_changed_without_losing_a_chunk(make: Make) -> None:
    """All engines first read with the new key, then write with it, then drop the old key."""
    before, both, turned, after = make(OURS), make(OURS, NEXT), make(NEXT, OURS), make(NEXT)
    old, new = seal(before), seal(turned)
    assert seal(both)[0][:8] == old[0][:8]
    for codec in (both, turned):
        assert unseal(codec, *old) == unseal(codec, *new) == CONTENT
    assert unseal(after, *new) == CONTENT
    with pytest.raises(ChunkAuthError):
        unseal(after, *old)


def test_no_key_is_shown(make: Make) -> None:
    codec = make(OURS, THEIRS)
    shown = f"{codec!r} {codec}"
    assert OURS.hex() not in shown
    assert repr(OURS)[2:-1] not in shown


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from kvtier_sdk import ConfigError, TierSpec\n"
        "try:\n"
        f"    TierSpec.from_url('memory:?codec={write_keys(tmp_path / 'chunk.keys', OURS)}')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    printed = run([sys.executable, "-c", code], tmp_path)
    assert printed.endswith("codec 'aes-gcm' needs cryptography: pip install 'kvtier-sdk[seal]'\n")
    assert printed.count("\n") == 1
