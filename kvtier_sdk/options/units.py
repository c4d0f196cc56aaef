"""Quantities with units. Each parser accepts text, or a number in the unit of the result."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("KB", "MB", "GB", "TB", "PB", "EB")
_BYTES = {
    "": 1,
    **{unit.upper(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit: 1000**power for power, unit in enumerate(_DECIMAL, 1)},
}
_SECONDS: dict[str, int | Fraction] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 86400,
}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")


def _split(value: object, example: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a quantity; write for example {example}")
    return Fraction(match[1]), match[2]


def parse_bytes(value: object) -> int:
    """Parse a size in bytes: ``value`` is an ``int``, or text such as ``"64KiB"`` or ``"1.5GB"``.

    KiB, MiB, ... are powers of 1,024; KB, MB, ... are powers of 1,000.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; write for example '4GiB'")
        return value
    number, unit = _split(value, "'64KiB' or '4GiB'")
    factor = _BYTES.get(unit.upper())
    if factor is None:
        units = ", ".join((*_BINARY, *_DECIMAL))
        raise ValueError(f"{value!r}: unit {unit!r} is none of {units}")
    size = number * factor
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


#: The maximum duration. A longer one is a mistake, and may exceed the range of a float.
_LONGEST_S = 1e12


def parse_seconds(value: object) -> float:
    """Parse a duration in seconds: a number, or text with a unit such as ``"250ms"``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < _LONGEST_S:
            raise ValueError(f"{value} is not a duration; write for example '250ms'")
        return float(value)
    number, unit = _split(value, "'250ms' or '5s'")
    if not unit:
        raise ValueError(f"{value!r} has no unit; write for example '250ms' or '5s'")
    factor = _SECONDS.get(unit.lower())
    if factor is None:
        raise ValueError(f"{value!r}: unit {unit!r} is none of {', '.join(_SECONDS)}")
    if number * factor >= _LONGEST_S:
        raise ValueError(f"{unit!r} is a unit, but the number before it is too large")
    return float(number * factor)


def parse_share(value: object) -> float:
    """Parse a share of a whole: a number from 0 to 1, or text such as ``"5%"``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        share: float | Fraction = value
    else:
        number, unit = _split(value, "'5%' or 0.05")
        if unit not in ("", "%"):
            raise ValueError(f"{value!r}: write a percentage such as '5%'")
        share = number / 100 if unit else number
    if not 0 <= share <= 1:
        raise ValueError(f"{value!r} is outside 0% to 100%")
    return float(share)


def parse_bytes_or_share(value: object) -> int | float:
    """Parse a size in bytes (an ``int``), or a share of a whole (a ``float``) such as ``"5%"``."""
    if isinstance(value, float) or (isinstance(value, str) and value.strip().endswith("%")):
        return parse_share(value)
    return parse_bytes(value)


def format_bytes(size_bytes: float) -> str:
    """Format ``size_bytes`` with four significant digits: ``1536`` is ``"1.5 KiB"``."""
    for unit in _BINARY[:-1]:
        # Use the next unit for a size that would round to 1024.
        if abs(size_bytes) < 1023.5:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} EiB"


def format_seconds(duration_s: float) -> str:
    """Format a duration with three significant digits: ``0.05`` is ``"50 ms"``."""
    # Use the next unit for a duration that would round to 1000.
    if 0 < duration_s < 0.9995e-3:
        return f"{1e6 * duration_s:.3g} us"
    if duration_s < 0.9995:
        return f"{1e3 * duration_s:.3g} ms"
    if duration_s < 120:
        return f"{duration_s:.3g} s"
    if duration_s < 3600:
        return f"{duration_s / 60:.3g} min"
    return f"{duration_s / 3600:.3g} h" if duration_s < 86400 else f"{duration_s / 86400:.3g} d"


#: Types of options with a unit. An operator writes ``"4GiB"``, and the attribute is a number.
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Share = Annotated[float, BeforeValidator(parse_share)]
BytesOrShare = Annotated[Any, BeforeValidator(parse_bytes_or_share)]
Count = int
Flag = bool
