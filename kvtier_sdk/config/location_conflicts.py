"""Tiers that would get into each other's way because of where they keep their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from kvtier_sdk.config.tier_spec import TierSpec


def location_conflicts(specs: Mapping[str, TierSpec]) -> Iterator[tuple[str, str]]:
    """Find tiers that keep their chunks where another tier does.

    A tier inside another's place would have its chunks counted or swept away by the other. Two
    tiers in one place with different options would each follow their own. The same tier twice is
    no conflict.

    Args:
        specs: path in the configuration to tier.

    Yields:
        The path of the later tier of each pair, and what is wrong with it.
    """
    for (path, one), (later_path, later) in combinations(specs.items(), 2):
        place, later_place = one.config.location(), later.config.location()
        if place is None or later_place is None:
            continue
        owner = f"{one.name!r} ({path})"
        apart = "give each a place of its own"
        if place == later_place:
            if different := _different_options(one, later):
                fault = f"and so does {owner}, with other options ({different})"
                yield (
                    later_path,
                    f"keeps its chunks in {place}, {fault}: {apart}, or both the same options",
                )
        elif relation := _relation(later_place, place):
            fault = f"{relation} {place}, where {owner} keeps its own"
            yield later_path, f"keeps its chunks in {later_place}, {fault}: {apart}"


def _relation(place: str, other: str) -> str:
    if place.startswith(other.rstrip("/") + "/"):
        return "inside"
    return "around" if other.startswith(place.rstrip("/") + "/") else ""


def _different_options(one: TierSpec, other: TierSpec) -> str:
    if one.tier_class is not other.tier_class:
        return "another backend"
    values = vars(one.config), vars(other.config)
    names = zip(one.config.option_names(), type(one.config).model_fields, strict=True)
    return ", ".join(option for option, name in names if values[0][name] != values[1][name])
