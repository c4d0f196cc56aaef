"""Compresses payloads of 16-bit and 8-bit floats, without loss or by rounding.

The exponents of a KV cache carry 2.5 to 3 bits of information each; signs and mantissas look like
random bits. The lossless coder codes exponents in layers of two bits, and stores the other bits
unchanged. Payloads of other types are restored exactly too, but do not shrink.

A coded payload, little-endian::

    the coded blocks of 16,384 elements, one after the other; the last block may be shorter
    the payload's last bytes, if they do not fill a unit of 128 elements
    zeros, up to the alignment
    for each block: 4  its coded length; if it is the plain length, the block is stored unchanged
    16  footer:     4  magic, b"KVPL"
                    2  format, 1
                    2  number of the kind of floats
                    8  payload length

A coded block::

    rests: the sign and the mantissa of each element, the sign last
        the first 8 bits of each rest, if a rest has 8; the other bits in planes of 4, 2 or 1 bits
    head:  4 x 2  the number of rare exponents after each layer
           4 x 3  the three symbols of each layer: the commonest exponents in a sample of the block
    four layers of codes: for all exponents, and then for the exponents rare in the layer before
        a code has two bits: 0 to 2 for a symbol, 3 for a rare exponent; the last codes are padding
    the exponents that are rare in the last layer

In a plane of codes or bits, byte j of each 16 bytes has the codes of the elements j, 16 + j, 32 + j
and so on, from its lowest bits to its highest.

All lengths follow from the payload's length and the heads, so the layers' lengths are not stored.
The table of coded lengths follows the blocks. So no coded block begins after its place in the
payload, and the blocks can be decoded in place, from the last block to the first.

A rounded block (:class:`Float8`) has 129 bytes for each unit of 128 elements::

    1    scale: the exponent of the binade that becomes 256 to 512, with the bias of float32
    128  float8_e4m3fn

Scaling by a power of two moves the unit's largest element into the range from 256 to 448. Scaling
only shifts exponents. So each element is rounded once (to nearest, ties to even), zeros keep their
sign, and a second rounding changes nothing. A block with a NaN or an infinity is stored unchanged.

For bfloat16, the scale is at least 19, so a unit's elements below 2**-125 become 0 or 2**-125. For
float16, the scale is at least 120. At this scale, the smallest 8-bit number equals the smallest
float16. At the largest scale (254 or 142), a scaled element beyond 448 becomes 448.
"""

from __future__ import annotations

from typing import ClassVar

from kvtier_sdk.errors import ChunkError, ConfigError, CorruptChunkError

try:
    from kvtier_sdk.codecs import _planes as coder
except ImportError:
    coder = None  # type: ignore[assignment]

_MOST_KIND = 5
_NO_CODER = (
    "this installation of kvtier-sdk lacks the compiled coder; install this release's wheel for "
    "x86-64 with AVX2 or for ARM, or make one with 'make wheels'"
)


class Planes:
    """The lossless coder for payloads of ``dtype`` elements. Any thread may call it."""

    FLOATS: ClassVar[str] = "16-bit and 8-bit floats"
    # Maps a dtype's name, as torch or vLLM writes it, to its kind. Kinds 0 and 1 have 16 bits,
    # with exponents of 8 and 5 bits. Kinds 2 and 3 have 8 bits, with exponents of 4 and 5 bits.
    KINDS: ClassVar[dict[str, int]] = {
        "bfloat16": 0,
        "float16": 1,
        "float8_e4m3fn": 2,
        "float8_e4m3fnuz": 2,
        "fp8": 2,
        "fp8_e4m3": 2,
        "fp8_inc": 2,
        "float8_e5m2": 3,
        "float8_e5m2fnuz": 3,
        "fp8_e5m2": 3,
    }

    def __init__(self, dtype: str) -> None:
        if not self.supports(dtype):
            raise ValueError(f"cannot code elements of {dtype!r}")
        if coder is None:
            raise ConfigError(f"option 'compress' cannot be used: {_NO_CODER}")
        self._kind = self.KINDS[dtype.removeprefix("torch.")]

    @classmethod
    def supports(cls, dtype: str) -> bool:
        return dtype.removeprefix("torch.") in cls.KINDS

    def encode(self, payload: memoryview, stored: memoryview, alignment: int) -> int:
        """Write the coded payload to the beginning of ``stored``, and return its length."""
        # The length is a multiple of ``alignment``. If coding does not shorten the payload by at
        # least a sixteenth, the length is 0, and the content of ``stored`` is undefined.
        return coder.encode(self._kind, payload, stored, alignment)

    @staticmethod
    def decode(memory: memoryview, stored_bytes: int, payload_bytes: int) -> None:
        """Decode a payload in place. After a ChunkError, the content of ``memory`` is undefined."""
        if coder is None:
            # The chunk is intact, so raise an error that does not make an engine delete it.
            raise ChunkError(f"the chunk is compressed, and {_NO_CODER}")
        kind = int.from_bytes(memory[stored_bytes - 10 : stored_bytes - 8], "little")
        fits = 16 <= stored_bytes <= payload_bytes and kind <= _MOST_KIND
        if not fits or not coder.decode(kind, memory, stored_bytes, payload_bytes):
            raise CorruptChunkError("the compressed payload is damaged")


class Float8(Planes):
    """The lossy coder, which rounds a payload's elements to float8_e4m3fn."""

    FLOATS: ClassVar[str] = "bfloat16 and float16"
    KINDS: ClassVar[dict[str, int]] = {"bfloat16": 4, "float16": 5}
