from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_sdk import format_bytes
from kvtier_sdk.options.units import (
    format_seconds,
    parse_bytes,
    parse_bytes_or_share,
    parse_seconds,
    parse_share,
)

FACTORS = {f"{prefix}B": 1000**power for power, prefix in enumerate(["", *"KMGTPE"])}
FACTORS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTPE", 1)}


@given(st.integers(0, 2**63 - 1))
@example(2**53 + 1)
def test_a_whole_number_of_bytes_is_read_exactly(size_bytes: int) -> None:
    assert parse_bytes(size_bytes) == size_bytes
    assert parse_bytes(str(size_bytes)) == size_bytes


@given(st.integers(0, 7), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " "]))
def test_a_unit_multiplies(number: int, unit: str, gap: str) -> None:
    assert parse_bytes(f"{number}{gap}{unit}") == number * FACTORS[unit]
    assert parse_bytes(f"{number}{gap}{unit.lower()}") == number * FACTORS[unit]


@pytest.mark.parametrize(
    ("parse", "written"),
    [
        (parse_bytes, {"1.5GiB": 3 * 2**29, "4.1GB": 4_100_000_000, ".5 KiB": 512}),
        (parse_seconds, {"250ms": 0.25, "5s": 5.0, "100us": 1e-4, "2m": 120.0, "1h": 3600.0}),
        (parse_seconds, {"1.5d": 129_600.0, "1 H": 3600.0, 3: 3.0, 0.5: 0.5, 0: 0.0}),
        (parse_share, {"5%": 0.05, "100 %": 1.0, "0.25": 0.25, 0.3: 0.3, 0: 0.0}),
    ],
)
def test_quantities_as_people_write_them(
    parse: Callable[[object], float], written: dict[object, float]
) -> None:
    assert {value: parse(value) for value in written} == pytest.approx(written)


@pytest.mark.parametrize("value", ["5", "5 weeks", "-1s", -1, -0.5, math.inf, math.nan, True, None])
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        parse_seconds(value)


@pytest.mark.parametrize("value", ["101%", 1.01, -0.1, 2, math.nan, "5 percent", True])
def test_what_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        parse_share(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "negative"),
        ("-1GiB", "not a quantity"),
        ("", "not a quantity"),
        ("much", "not a quantity"),
        (True, "not a quantity"),
        (1.5, "not a quantity"),
        (None, "not a quantity"),
        ("4 gigs", "unit 'gigs' is none of"),
        ("5%", "unit '%' is none of"),
        ("0.3B", "not a whole number of bytes"),
        ("0.1GiB", "not a whole number of bytes"),
    ],
)
def test_what_is_no_size_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(value)


def test_a_limit_is_a_size_or_a_share() -> None:
    size = parse_bytes_or_share("1KiB")
    assert (size, type(size)) == (1024, int)
    for value in ("5%", " 5% ", 0.05):
        share = parse_bytes_or_share(value)
        assert (share, type(share)) == (pytest.approx(0.05), float)
    one = parse_bytes_or_share(1)
    assert (one, type(one)) == (1, int)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**30, "1 GiB"),
        (5 * 2**40, "5 TiB"),
        (3 * 2**50, "3 PiB"),
        (2**60, "1 EiB"),
        (2**20 - 1, "1 MiB"),
        (1023.4, "1023 B"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_a_size_is_written_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 1000), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]))
def test_a_written_size_is_read_back(number: int, unit: str) -> None:
    size_bytes = min(number * FACTORS[unit], 7 * FACTORS["EiB"])
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        *((0, "0 ms"), (25e-6, "25 us"), (0.9994e-3, "999 us"), (0.9996e-3, "1 ms")),
        *((0.9994, "999 ms"), (0.9996, "1 s"), (34.2, "34.2 s"), (150, "2.5 min")),
        *((7200, "2 h"), (172_800, "2 d")),
    ],
)
def test_a_duration_is_written_for_people(duration_s: float, text: str) -> None:
    assert format_seconds(duration_s) == text
