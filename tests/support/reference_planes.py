"""Decodes the compiled coder's output, using only the description of the format."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

_BLOCK, _UNIT, _GROUP, _ROW = 16384, 128, 64, 16
_LAYERS, _SYMBOLS = 4, 3
_HEAD = struct.Struct(f"<{_LAYERS}H{_LAYERS * _SYMBOLS}s")
_FOOTER = struct.Struct("<4sHHQ")
#: For each kind: the bytes per element, the exponent bits, and whether elements are rounded.
_KINDS = [(2, 8, False), (2, 5, False), (1, 4, False), (1, 5, False), (2, 8, True), (2, 5, True)]
#: The smallest and the largest scale, by the number of exponent bits.
_SCALES = {8: (19, 254), 5: (120, 142)}

_Array = np.ndarray[Any, Any]


def decode(number: int, memory: memoryview, stored_bytes: int, payload_bytes: int) -> bool:
    """Decode in place; return false if the coded payload is malformed."""
    size = _KINDS[number][0]
    stored = bytes(memory[:stored_bytes])
    tail = payload_bytes % (size * _UNIT)
    starts = range(0, payload_bytes - tail, _BLOCK * size)
    room = stored_bytes - _FOOTER.size - 4 * len(starts)
    if room < 0 or not stored.endswith(_FOOTER.pack(b"KVPL", 1, number, payload_bytes)):
        return False
    lengths = np.frombuffer(stored, "<u4", len(starts), room).tolist()
    plain = [min(_BLOCK * size, payload_bytes - tail - start) for start in starts]
    if any(map(int.__gt__, lengths, plain)) or sum(lengths) + tail > room:
        return False
    at = 0
    for start, whole, length in zip(starts, plain, lengths, strict=True):
        block: _Array | None = np.frombuffer(stored, np.uint8, length, at)
        if length < whole:
            block = _decode_block(number, whole // size, block)
        if block is None:
            return False
        memory[start : start + whole] = block.tobytes()
        at += length
    memory[payload_bytes - tail : payload_bytes] = stored[at : at + tail]
    return True


def _decode_block(number: int, count: int, coded: _Array) -> _Array | None:
    size, exponent_bits, is_rounded = _KINDS[number]
    if is_rounded:
        return _restore_block(exponent_bits, count, coded)
    rest_bits = 8 * size - exponent_bits
    head = count * rest_bits // 8
    if len(coded) < head + _HEAD.size:
        return None
    *rare, symbols = _HEAD.unpack(coded[head : head + _HEAD.size].tobytes())
    counts = [count, *rare]
    starts = [head + _HEAD.size]
    for one, fewer in zip(counts, rare, strict=False):
        if fewer > one:
            return None
        starts.append(starts[-1] + -(-one // _GROUP) * _ROW)
    if len(coded) != starts[-1] + counts[-1]:
        return None
    values = coded[starts[-1] :]
    for layer in reversed(range(_LAYERS)):
        some = np.frombuffer(symbols, np.uint8, _SYMBOLS, layer * _SYMBOLS)
        codes = _unpack(coded[starts[layer] : starts[layer + 1]], 2)
        places = np.flatnonzero(codes == _SYMBOLS)
        if len(places) != len(values):
            return None
        widened = np.append(some, np.uint8(0)).take(codes)
        widened[places] = values
        values = widened[: counts[layer]]
    turned = values.astype(f"<u{size}") << rest_bits
    place, shift = 0, 0
    if size == 2:
        turned |= coded[:count]
        place, shift = count, 8
    for width in (width for width in (4, 2, 1) if rest_bits & width):
        plane = coded[place : place + count * width // 8]
        turned |= _unpack(plane, width).astype(turned.dtype) << shift
        place, shift = place + len(plane), shift + width
    # Rotate right, because the coder moves the sign to the lowest bit.
    return (turned >> 1 | turned << (8 * size - 1)).view(np.uint8)


def _restore_block(exponent_bits: int, count: int, coded: _Array) -> _Array | None:
    if len(coded) != count // _UNIT * (1 + _UNIT):
        return None
    units = coded.reshape(-1, 1 + _UNIT).astype(np.uint32)
    scales, codes, signs = units[:, :1], units[:, 1:] & 127, units[:, 1:] >> 7
    least, most = _SCALES[exponent_bits]
    if np.any(scales < least) or np.any(scales > most):
        return None
    normal = ((codes << 20) + (120 << 23)).view(np.float32)
    small = codes.astype(np.float32) / np.float32(512)
    powers = ((scales - 8) << 23).view(np.float32)
    numbers = np.where(codes < 8, small, normal) * powers
    if exponent_bits == 8:
        magnitudes = (numbers.view(np.uint32) >> 16).astype("<u2")
    else:
        magnitudes = numbers.astype("<f2").view("<u2")
    return (magnitudes | signs.astype("<u2") << 15).view(np.uint8).ravel()


def _unpack(plane: _Array, width: int) -> _Array:
    shifts = np.arange(0, 8, width, dtype=np.uint64)[:, None]
    words = plane.copy().view("<u8").reshape(-1, 1, _ROW // 8) >> shifts
    return words.view(np.uint8).ravel() & np.uint8(2**width - 1)
