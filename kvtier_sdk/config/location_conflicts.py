"""Tiers that would get into each other's way because of where they keep their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from kvtier_sdk.config.tier_spec import TierSpec


def location_conflicts(specs: Mapping[str, TierSpec]) -> Iterator[tuple[str, str]]:
    """Find tiers that keep their chunks where another one does.

    One in the middle of another's place would be counted, or swept away, by it; two in one place
    with different options would each follow its own. The same tier twice is no clash.

    Args:
        specs: path of each tier in its configuration to the tier.

    Yields:
        The path of the later tier of each pair, and what is wrong with it.
    """
    for (path, one), (later_path, later) in combinations(specs.items(), 2):
        fault = _clash(one, path, later)
        if fault is not None:
            yield later_path, fault


def _clash(one: TierSpec, path: str, later: TierSpec) -> str | None:
    place, later_place = one.config.location(), later.config.location()
    if place is None or later_place is None:
        return None
    if place == later_place:
        different = _different_options(one, later)
        return different and (
            f"keeps its chunks in {place}, and so does {one.name!r} ({path}), with other "
            f"options ({different}): give each a place of its own, or both the same options"
        )
    if _is_inside(later_place, place):
        relation = f"inside {place}, where {one.name!r} ({path}) keeps its own"
    elif _is_inside(place, later_place):
        relation = f"around {place}, where {one.name!r} ({path}) keeps its own"
    else:
        return None
    return f"keeps its chunks in {later_place}, {relation}: give each a place of its own"


def _is_inside(place: str, outer: str) -> bool:
    return place.startswith(outer.rstrip("/") + "/")


def _different_options(one: TierSpec, other: TierSpec) -> str | None:
    if one.tier_class is not other.tier_class:
        return "another backend"
    names = zip(one.config.option_names(), type(one.config).model_fields, strict=True)
    values = vars(one.config), vars(other.config)
    different = [option for option, name in names if values[0][name] != values[1][name]]
    return ", ".join(different) or None
