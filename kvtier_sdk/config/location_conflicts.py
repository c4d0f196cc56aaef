"""Tiers that would get into each other's way because of where they keep their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.options.place import Place


def location_conflicts(specs: Mapping[Place, TierSpec]) -> Iterator[str]:
    """Complain about tiers that keep their chunks where another tier does.

    A tier inside another's location would have its chunks counted or swept away by the other. Two
    tiers in one location with different options would each follow their own. The same tier twice
    is no conflict.
    """
    for (one_place, one), (place, tier) in combinations(specs.items(), 2):
        first, location = one.config.location(), tier.config.location()
        if first is None or location is None:
            continue
        keeps = f"{place}: {tier.name!r} keeps its chunks in {location}"
        other, apart = f"{one.name!r} ({one_place.path})", "give each a place of its own"
        if location == first:
            if different := _different_options(one, tier):
                fault = f"and so does {other}, with other options ({different})"
                yield f"{keeps}, {fault}: {apart}, or both the same options"
        elif relation := _relation(location, first):
            yield f"{keeps}, {relation} {first}, where {other} keeps its own: {apart}"


def _relation(location: str, other: str) -> str:
    if location.startswith(other.rstrip("/") + "/"):
        return "inside"
    return "around" if other.startswith(location.rstrip("/") + "/") else ""


def _different_options(one: TierSpec, other: TierSpec) -> str:
    if one.tier_class is not other.tier_class:
        return "another backend"
    values = vars(one.config), vars(other.config)
    names = zip(one.config.option_names(), type(one.config).model_fields, strict=True)
    return ", ".join(option for option, name in names if values[0][name] != values[1][name])
