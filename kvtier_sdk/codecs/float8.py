"""Rounds payloads of 16-bit floats to half their bytes.

Elements become float8_e4m3fn, and each unit of 128 has a scale, a power of two: the unit's largest
element becomes 256 to 448. A scale only shifts exponents, so each element is rounded once (to
nearest, ties to even), zeros keep their sign, and what was rounded comes through again unchanged.

The payload is divided, and ends, as :mod:`kvtier_sdk.codecs.planes` describes. A coded block has
129 bytes for each unit:

    1    scale: the exponent of the binade that becomes 256 to 512, with the bias of float32
    128  float8_e4m3fn

A block with a NaN or an infinity is stored as it is, and so are the bytes after the last unit.

The scale is at least 19 for bfloat16, so a unit's elements below 2**-125 become 0 or 2**-125. It
is at least 120 for float16, and then the smallest number in 8 bits is float16's own. In the largest
binades, 254 and 142, an element beyond 448 becomes 448.
"""

from __future__ import annotations

from typing import ClassVar

from kvtier_sdk.codecs.planes import Planes


class Float8(Planes):
    """A coder of payloads that loses bits. Any thread may call it."""

    FLOATS: ClassVar[str] = "bfloat16 and float16"
    KINDS: ClassVar[dict[str, int]] = {"bfloat16": 4, "float16": 5}
