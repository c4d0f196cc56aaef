"""Rounds blocks as the compiled part does, with the same bytes, where it is not installed.

:mod:`kvtier_sdk.codecs.float8` describes the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_UNIT = 128
#: By bits of the exponent: the smallest and the largest scale.
_SCALES = {8: (19, 254), 5: (120, 142)}

_Bytes = NDArray[np.uint8]
_Numbers = NDArray[Any]


def round_block(exponent_bits: int, plain: _Bytes) -> _Bytes:
    """Return the coded block, or the plain one if an element is not finite."""
    elements = plain.view("<u2").reshape(-1, _UNIT)
    magnitudes = elements & 0x7FFF
    largest = magnitudes.max(axis=1, keepdims=True)
    if np.any(largest >> (15 - exponent_bits) == 2**exponent_bits - 1):
        return plain
    # The largest element becomes 256 to 448, after rounding.
    scales = (_widened(exponent_bits, largest).view(np.uint32) + 0x17FFFF) >> 23
    scales = scales.clip(*_SCALES[exponent_bits]).astype(np.uint32)
    numbers = _widened(exponent_bits, magnitudes) * _powers(262 - scales)
    bits = numbers.view(np.uint32)
    normal = (bits - np.uint32(120 << 23) + 0x7FFFF + (bits >> 20 & 1)) >> 20
    denormal = np.rint(numbers * 512).astype(np.uint32)
    codes = np.where(numbers < 2**-6, denormal, normal).clip(max=126)
    coded = np.hstack([scales, codes | elements >> 8 & 0x80]).astype(np.uint8)
    return coded.ravel()


def restore_block(exponent_bits: int, count: int, coded: _Bytes) -> _Bytes | None:
    """Return the plain block, or ``None`` if the coded block is malformed."""
    if len(coded) != count // _UNIT * (1 + _UNIT):
        return None
    units = coded.reshape(-1, 1 + _UNIT).astype(np.uint32)
    scales, codes, signs = units[:, :1], units[:, 1:] & 127, units[:, 1:] >> 7
    least, most = _SCALES[exponent_bits]
    if np.any(scales < least) or np.any(scales > most):
        return None
    normal = ((codes << 20) + (120 << 23)).view(np.float32)
    small = codes.astype(np.float32) / np.float32(512)
    numbers = np.where(codes < 8, small, normal) * _powers(scales - 8)
    if exponent_bits == 8:
        magnitudes = (numbers.view(np.uint32) >> 16).astype("<u2")
    else:
        magnitudes = numbers.astype("<f2").view("<u2")
    plain: _Bytes = (magnitudes | signs.astype("<u2") << 15).view(np.uint8)
    return plain.ravel()


def _widened(exponent_bits: int, magnitudes: _Numbers) -> _Numbers:
    if exponent_bits == 8:
        return (magnitudes.astype(np.uint32) << 16).view(np.float32)
    return magnitudes.view("<f2").astype(np.float32)


def _powers(exponents: _Numbers) -> _Numbers:
    """Powers of two, from exponents with the bias of a float."""
    return (exponents.astype(np.uint32) << 23).view(np.float32)
