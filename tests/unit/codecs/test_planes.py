from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import reference_planes
from support.extensions import compile_extension

from kvtier_sdk import ChunkError, ConfigError, CorruptChunkError
from kvtier_sdk.codecs import planes
from kvtier_sdk.codecs.planes import Float8, Planes

#: The number of sign and mantissa bits, for each type with an exact coder.
REST_BITS = {"bfloat16": 8, "float16": 11, "float8_e4m3fn": 4, "float8_e5m2": 3}
DTYPES = list(REST_BITS)
ROUNDED = ["bfloat16 in fp8", "float16 in fp8"]
#: For each rounding coder: the number of mantissa bits, and the lowest and the highest exponent of
#: a unit's scale. All elements of a unit are divided by its scale, a power of two.
SCALES = {"bfloat16 in fp8": (7, -116, 119), "float16 in fp8": (10, -15, 7)}
BLOCK, UNIT = 16384, 128
SOURCE = Path(planes.__file__).with_name("_planes.c")
in_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> ModuleType:
    # If CFLAGS is set, build anew with these flags, because a sanitizer needs them.
    if planes.coder is not None and "CFLAGS" not in os.environ:
        return planes.coder
    found = compile_extension(SOURCE, tmp_path_factory.mktemp("compiled"))
    if found is None:
        pytest.skip("no C compiler, or no headers of Python")
    return found


@pytest.fixture(autouse=True)
def coder(compiled, monkeypatch) -> ModuleType:
    monkeypatch.setattr(planes, "coder", compiled)
    return compiled


@pytest.fixture
def reference(compiled, monkeypatch) -> None:
    both = SimpleNamespace(encode=compiled.encode, decode=reference_planes.decode)
    monkeypatch.setattr(planes, "coder", both)


def normal(dtype: str, elements: int, seed: int = 0) -> bytes:
    dtype = dtype.removesuffix(" in fp8")
    floats = np.random.default_rng(seed).standard_normal(elements).astype("<f4")
    if dtype == "bfloat16":
        return (floats.view("<u4") >> 16).astype("<u2").tobytes()
    half = (floats / 4).astype("<f2").view("<u2")
    if dtype == "float16":
        return half.tobytes()
    if dtype == "float8_e5m2":
        return (half >> 8).astype(np.uint8).tobytes()
    # Drop the exponent's highest bit, which is 0 for numbers below 2.
    return (half >> 8 & 128 | half >> 7 & 127).astype(np.uint8).tobytes()


def coder_of(dtype: str) -> Planes:
    return Float8(dtype.removesuffix(" in fp8")) if dtype in ROUNDED else Planes(dtype)


def expected(dtype: str, payload: bytes) -> bytes:
    """Round the payload as its coder does, by a search among all numbers of float8_e4m3fn."""
    if dtype not in ROUNDED:
        return payload
    bits, least, most = SCALES[dtype]
    codes = np.arange(127)
    values = np.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
    middles = (values[:-1] + values[1:]) / 2
    rounded = bytearray(payload)
    units = len(payload) // UNIT // 2 * UNIT
    for start in range(0, units, BLOCK):
        place = slice(2 * start, 2 * min(start + BLOCK, units))
        elements = np.frombuffer(payload[place], "<u2").reshape(-1, UNIT)
        numbers = floats(bits, elements & 0x7FFF)
        if not np.isfinite(numbers).all():
            continue
        # 464, halfway between 448 and 480, still rounds to 448.
        numbers = numbers.astype(float)
        largest = np.maximum(numbers.max(axis=1, keepdims=True), 2.0**-200)
        powers = 2.0 ** np.ceil(np.log2(largest / 464)).clip(least, most)
        found = np.searchsorted(middles, numbers / powers)
        is_tie = np.append(middles, 0)[found] == numbers / powers
        numbers = values[found + (is_tie & (found % 2 == 1))] * powers
        whole = numbers.astype("<f2").view("<u2") if bits == 10 else numbers.astype("<f4")
        magnitudes = whole if bits == 10 else (whole.view("<u4") >> 16).astype("<u2")
        rounded[place] = (magnitudes | elements & 0x8000).tobytes()
    return bytes(rounded)


def floats(bits: int, elements: np.ndarray) -> np.ndarray:
    if bits == 10:
        return elements.view("<f2")
    return (elements.astype("<u4") << 16).view("<f4")


def encode(dtype: str, payload: bytes, alignment: int = 1) -> bytes:
    guard = b"\xa5" * 64
    length = -(-len(payload) // alignment) * alignment
    memory = bytearray(guard + bytes(length) + guard)
    stored_bytes = coder_of(dtype).encode(
        memoryview(payload), memoryview(memory)[64 : 64 + length], alignment
    )
    assert memory[:64] == memory[64 + length :] == guard
    assert stored_bytes % alignment == 0
    assert stored_bytes <= len(payload) * 15 / 16
    return bytes(memory[64 : 64 + stored_bytes])


def decode(dtype: str, stored: bytes, payload_bytes: int) -> bytes:
    guard = b"\x5a" * 64
    memory = bytearray(guard + stored.ljust(payload_bytes, b"\xee")[:payload_bytes] + guard)
    try:
        Planes.decode(memoryview(memory)[64:-64], len(stored), payload_bytes)
    finally:
        assert memory[:64] == memory[-64:] == guard
    return bytes(memory[64:-64])


@pytest.mark.parametrize("dtype", DTYPES + ROUNDED)
@pytest.mark.parametrize("elements", [128, 127 * 128, BLOCK, BLOCK + 128, 5 * BLOCK + 640, 200_000])
def test_floats_come_back(dtype, elements):
    payload = normal(dtype, elements)
    for extra in (b"", b"\x01", b"tail" * 31):
        stored = encode(dtype, payload + extra)
        if elements >= BLOCK:
            assert stored
        if stored:
            decoded = decode(dtype, stored, len(payload + extra))
            assert decoded == expected(dtype, payload + extra)
            assert encode(dtype, decoded) == stored


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        ("bfloat16", 1.48),
        ("float16", 1.16),
        ("float8_e4m3fn", 1.18),
        ("float8_e5m2", 1.38),
        ("bfloat16 in fp8", 1.96),
        ("float16 in fp8", 1.96),
    ],
)
def test_the_ratio_of_normally_distributed_floats(dtype, least):
    payload = normal(dtype, 2**18)
    assert len(payload) / len(encode(dtype, payload, 4096)) > least


@pytest.mark.parametrize("dtype", DTYPES + ROUNDED)
def test_the_format_is_as_described(reference, dtype):
    payload = bytearray(normal(dtype, 9 * BLOCK + 1000) + b"odd")
    payload[5000 : 5000 + BLOCK] = np.random.default_rng(1).bytes(BLOCK)
    payload[4 * BLOCK : 4 * BLOCK + 999] = bytes(999)
    stored = encode(dtype, bytes(payload), 512)
    assert stored
    assert decode(dtype, stored, len(payload)) == expected(dtype, bytes(payload))


# The patterns include NaNs with payloads, infinities, denormals and both zeros.
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_comes_back(dtype):
    size = 2 if dtype in ("bfloat16", "float16") else 1
    common = normal(dtype, 80 * BLOCK)
    patterns = np.random.default_rng(2).permutation(2 ** (8 * size)).astype(f"<u{size}")
    mixed = np.frombuffer(common, patterns.dtype).copy()
    mixed[: 20 * len(patterns) : 20] = patterns
    # Spread the patterns thinly too, because a block of only patterns is stored uncoded.
    for payload in (common + patterns.tobytes(), mixed.tobytes()):
        stored = encode(dtype, payload)
        assert stored
        assert decode(dtype, stored, len(payload)) == payload


# A block with a NaN or an infinity is not rounded.
@pytest.mark.parametrize("dtype", ROUNDED)
def test_every_pattern_is_rounded(dtype):
    patterns = np.arange(2**16, dtype="<u2")
    finite = patterns[np.isfinite(floats(SCALES[dtype][0], patterns & 0x7FFF))]
    shuffled = np.random.default_rng(2).permutation(finite)
    tiny = np.tile(patterns[:UNIT], 400)
    for elements in (patterns, finite, shuffled, np.concatenate([patterns, tiny, shuffled])):
        payload = elements.tobytes() + normal(dtype, 4 * BLOCK)
        stored = encode(dtype, payload)
        assert decode(dtype, stored, len(payload)) == expected(dtype, payload)


@pytest.mark.parametrize("scale", [0, 18, 119, 143, 255])
def test_an_impossible_scale_is_refused(scale):
    payload = normal("float16 in fp8", 2 * BLOCK)
    stored = bytearray(encode("float16 in fp8", payload))
    stored[129 * 200] = scale
    with pytest.raises(CorruptChunkError):
        decode("float16 in fp8", bytes(stored), len(payload))


@pytest.mark.parametrize("dtype", DTYPES + ROUNDED)
@pytest.mark.parametrize("payload", [b"", b"\x80", bytes(255), b"\xff" * 300, bytes(70_001)])
def test_small_and_uniform_payloads_come_back(dtype, payload):
    stored = encode(dtype, payload)
    assert stored or len(payload) < 1000
    if stored:
        assert decode(dtype, stored, len(payload)) == expected(dtype, payload)


@pytest.mark.parametrize("dtype", DTYPES + ROUNDED)
def test_random_bits_gain_nothing(dtype):
    assert encode(dtype, np.random.default_rng(3).bytes(100_000)) == b""


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16 in fp8"])
@pytest.mark.parametrize("alignment", [2**power for power in range(13)])
def test_alignments(dtype, alignment):
    payload = normal(dtype, 70_000) + b"!"
    stored = encode(dtype, payload, alignment)
    assert decode(dtype, stored, len(payload)) == expected(dtype, payload)


VLLM_NAMES = ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"]


@pytest.mark.parametrize("name", DTYPES + VLLM_NAMES + [f"torch.{dtype}" for dtype in DTYPES])
def test_supported(name):
    assert Planes.supports(name)
    assert Float8.supports(name) is name.endswith("float16")


@pytest.mark.parametrize("name", ["float32", "torch.int8", "uint8", "", "torch", "fp8_ds_mla"])
def test_other_types_are_not_supported(name):
    for coder in (Planes, Float8):
        assert not coder.supports(name)
        with pytest.raises(ValueError, match=f"cannot code elements of '{name}'"):
            coder(name)


@pytest.mark.parametrize("dtype", DTYPES + ROUNDED)
def test_another_length_is_refused(dtype):
    payload = normal(dtype, 3 * BLOCK)
    stored = encode(dtype, payload)
    for length in (-1, 0, 8, 16, len(stored) - 1, len(stored) + 1, len(payload), len(payload) + 1):
        memory = bytearray(stored.ljust(len(payload) + 1, b"\0"))
        with pytest.raises(CorruptChunkError):
            Planes.decode(memoryview(memory), length, len(payload))
    with pytest.raises(CorruptChunkError):
        decode(dtype, stored, len(payload) + 1)


@pytest.mark.parametrize("dtype", DTYPES + ROUNDED)
@in_fixture
@given(data=st.data())
def test_damaged_bytes_are_refused_or_decoded_alike(compiled, dtype, data):
    payload = normal(dtype, BLOCK + 256) + b"end"
    stored = bytearray(encode(dtype, payload))
    # Most bytes are signs and mantissas, which may have any value. Damage heads and tables too.
    head, end = BLOCK * REST_BITS.get(dtype, 0) // 8, len(stored) - 1
    places = st.integers(0, end) | st.integers(head, head + 40) | st.integers(end - 40, end)
    for at, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=8)):
        stored[at] = value
    results = set()
    try:
        for planes.coder in (compiled, reference_planes):
            try:
                results.add(decode(dtype, bytes(stored), len(payload)))
            except CorruptChunkError:
                results.add(None)
    finally:
        planes.coder = compiled
    assert len(results) == 1


def test_without_the_compiled_coder(monkeypatch):
    stored = encode("bfloat16", normal("bfloat16", BLOCK))
    monkeypatch.setattr(planes, "coder", None)
    with pytest.raises(ConfigError, match="'compress' cannot be used: .* lacks the compiled coder"):
        Planes("bfloat16")
    # After a CorruptChunkError, the SDK would delete another engine's chunk.
    with pytest.raises(ChunkError, match="lacks the compiled coder; install") as refused:
        decode("bfloat16", stored, 2 * BLOCK)
    assert not isinstance(refused.value, CorruptChunkError)


def test_threads_do_not_disturb_each_other():
    payloads = [normal("bfloat16", 3 * BLOCK, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        stored = list(threads.map(encode, ["bfloat16"] * 8, payloads))
        decoded = threads.map(decode, ["bfloat16"] * 8, stored, map(len, payloads))
        assert list(decoded) == payloads


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("encode", (6, b"", bytearray(0), 1)),
        ("encode", (0, b"12", bytearray(1), 1)),
        ("encode", (0, b"12", bytearray(2), 0)),
        ("encode", (0, b"12", b"12", 1)),
        ("encode", (0, "12", bytearray(2), 1)),
        ("decode", (6, bytearray(9), 1, 9)),
        ("decode", (0, bytearray(9), 1, 10)),
        ("decode", (0, bytearray(9), -1, 9)),
        ("decode", (0, bytearray(9), 9, 8)),
        ("decode", (0, b"read-only", 1, 9)),
        ("decode", (0, bytearray(9), 2**64, 9)),
    ],
)
def test_wrong_arguments(compiled, call, arguments):
    with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
        getattr(compiled, call)(*arguments)
