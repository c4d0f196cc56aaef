"""Codes payloads as the compiled part does, with the same bytes, where it is not installed.

:mod:`kvtier_sdk.codecs.planes` describes the format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_sdk.codecs.numpy_float8 import restore_block, round_block

_BLOCK = 16384
_UNIT = 128
_LAYERS = 4
_SYMBOLS = 3
_SAMPLE_STEP = 31
_GROUP = 64
_ROW = 16
_HEAD = struct.Struct(f"<{_LAYERS}H{_LAYERS * _SYMBOLS}s")
_FOOTER = struct.Struct("<4sHHQ")
_MAGIC = b"KVPL"
_FORMAT = 1
_LEAST_GAIN = 16

_Bytes = NDArray[np.uint8]


class _Kind(NamedTuple):
    bytes: int
    exponent_bits: int
    is_rounded: bool = False

    @property
    def rest_bits(self) -> int:
        return 8 * self.bytes - self.exponent_bits

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bytes}")

    @property
    def planes(self) -> list[int]:
        """The numbers of bits of the planes after the first eight bits of a rest."""
        return [width for width in (4, 2, 1) if self.rest_bits & width]


_KINDS = [_Kind(2, 8), _Kind(2, 5), _Kind(1, 4), _Kind(1, 5)]
_KINDS += [_Kind(2, 8, is_rounded=True), _Kind(2, 5, is_rounded=True)]


def encode(number: int, payload: memoryview, stored: memoryview, alignment: int, /) -> int:
    kind = _KINDS[number]
    plain = np.frombuffer(payload, np.uint8)
    blocks = [_encode_block(kind, plain[place]) for place in _places(kind, len(plain))]
    lengths = np.array([len(block) for block in blocks], "<u4")
    coded = b"".join([*blocks, plain[len(plain) - _tail_bytes(kind, len(plain)) :].tobytes()])
    trailer = lengths.tobytes() + _FOOTER.pack(_MAGIC, _FORMAT, number, len(plain))
    stored_bytes = -(-(len(coded) + len(trailer)) // alignment) * alignment
    if stored_bytes > len(plain) - len(plain) // _LEAST_GAIN:
        return 0
    stored[:stored_bytes] = coded.ljust(stored_bytes - len(trailer), b"\0") + trailer
    return stored_bytes


def decode(number: int, memory: memoryview, stored_bytes: int, payload_bytes: int, /) -> bool:
    kind = _KINDS[number]
    footer = _FOOTER.pack(_MAGIC, _FORMAT, number, payload_bytes)
    stored = bytes(memory[:stored_bytes])
    places = list(_places(kind, payload_bytes))
    tail_bytes = _tail_bytes(kind, payload_bytes)
    room = stored_bytes - len(footer) - 4 * len(places)
    if room < 0 or not stored.endswith(footer):
        return False
    lengths = np.frombuffer(stored, "<u4", len(places), room).tolist()
    sizes = [place.stop - place.start for place in places]
    if any(length > size for length, size in zip(lengths, sizes, strict=True)):
        return False
    if sum(lengths) + tail_bytes > room:
        return False
    at = 0
    for place, size, length in zip(places, sizes, lengths, strict=True):
        block = np.frombuffer(stored, np.uint8, length, at)
        decoded = block if length == size else _decode_block(kind, size // kind.bytes, block)
        if decoded is None:
            return False
        memory[place] = decoded.tobytes()
        at += length
    memory[payload_bytes - tail_bytes : payload_bytes] = stored[at : at + tail_bytes]
    return True


def _tail_bytes(kind: _Kind, payload_bytes: int) -> int:
    return payload_bytes % (kind.bytes * _UNIT)


def _places(kind: _Kind, payload_bytes: int) -> Iterator[slice]:
    end = payload_bytes - _tail_bytes(kind, payload_bytes)
    for start in range(0, end, _BLOCK * kind.bytes):
        yield slice(start, min(start + _BLOCK * kind.bytes, end))


def _encode_block(kind: _Kind, plain: _Bytes) -> bytes:
    if kind.is_rounded:
        return round_block(kind.exponent_bits, plain).tobytes()
    elements = plain.view(kind.dtype)
    # Rotate the sign to the end, so that the exponent comes first.
    turned = elements << 1 | elements >> (8 * kind.bytes - 1)
    rests, shift = [], 0
    if kind.bytes == 2:
        rests, shift = [turned.astype(np.uint8)], 8
    for width in kind.planes:
        rests.append(_pack((turned >> shift).astype(np.uint8), width))
        shift += width
    values = (turned >> kind.rest_bits).astype(np.uint8)
    counts = np.bincount(values[::_SAMPLE_STEP], minlength=256)
    symbols = np.argsort(-counts, kind="stable")[: _LAYERS * _SYMBOLS].astype(np.uint8)
    layers, rare_counts = [], []
    for some in symbols.reshape(_LAYERS, _SYMBOLS):
        code_of = np.full(256, _SYMBOLS, np.uint8)
        code_of[some] = range(_SYMBOLS)
        padding = np.full(-len(values) % _GROUP, some[0])
        codes = code_of.take(np.concatenate([values, padding]))
        layers.append(_pack(codes, 2))
        values = values.take(np.flatnonzero(codes == _SYMBOLS))
        rare_counts.append(len(values))
    head = np.frombuffer(_HEAD.pack(*rare_counts, symbols.tobytes()), np.uint8)
    coded = np.concatenate([*rests, head, *layers, values])
    return (coded if len(coded) < len(plain) else plain).tobytes()


def _decode_block(kind: _Kind, count: int, coded: _Bytes) -> _Bytes | None:
    """Return the plain block, or ``None`` if the coded block is malformed."""
    if kind.is_rounded:
        return restore_block(kind.exponent_bits, count, coded)
    at = count * kind.rest_bits // 8
    if len(coded) < at + _HEAD.size:
        return None
    *rare_counts, symbols = _HEAD.unpack(coded[at : at + _HEAD.size].tobytes())
    counts = [count, *rare_counts]
    starts = [at + _HEAD.size]
    for one, other in zip(counts, rare_counts, strict=False):
        if other > one:
            return None
        starts.append(starts[-1] + -(-one // _GROUP) * _ROW)
    if len(coded) != starts[-1] + counts[-1]:
        return None
    values = coded[starts[-1] :]
    for layer in reversed(range(_LAYERS)):
        some = np.frombuffer(symbols, np.uint8, _SYMBOLS, layer * _SYMBOLS)
        codes = _unpack(coded[starts[layer] : starts[layer + 1]], 2)
        rare = np.flatnonzero(codes == _SYMBOLS)
        if len(rare) != len(values):
            return None
        widened = np.append(some, np.uint8(0)).take(codes)
        widened[rare] = values
        values = widened[: counts[layer]]
    turned = values.astype(kind.dtype) << kind.rest_bits
    place, shift = 0, 0
    if kind.bytes == 2:
        turned |= coded[:count]
        place, shift = count, 8
    for width in kind.planes:
        plane = coded[place : place + count * width // 8]
        turned |= _unpack(plane, width).astype(kind.dtype) << shift
        place, shift = place + len(plane), shift + width
    plain: _Bytes = (turned >> 1 | turned << (8 * kind.bytes - 1)).view(np.uint8)
    return plain


def _pack(values: _Bytes, width: int) -> _Bytes:
    """Pack the lowest bits of each value into a plane, eight bytes at a time."""
    words = (values & np.uint8(2**width - 1)).view("<u8").reshape(-1, 8 // width, _ROW // 8)
    plane: _Bytes = np.bitwise_or.reduce(words << _shifts(width), axis=1).view(np.uint8)
    return plane.ravel()


def _unpack(plane: _Bytes, width: int) -> _Bytes:
    words = plane.copy().view("<u8").reshape(-1, 1, _ROW // 8) >> _shifts(width)
    return words.view(np.uint8).ravel() & np.uint8(2**width - 1)


def _shifts(width: int) -> NDArray[np.uint64]:
    return np.arange(0, 8, width, dtype=np.uint64)[:, None]
