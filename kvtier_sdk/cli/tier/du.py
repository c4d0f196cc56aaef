"""``kvtier tier du``: how much space each model uses in tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, read_target
from kvtier_sdk.cli.terminal import JsonOption, print_columns, say, share
from kvtier_sdk.cli.tier.contents import Contents, sizes_as_json, sizes_in_words
from kvtier_sdk.cli.tier.maintenance import open_for_maintenance
from kvtier_sdk.cli.tier.options import TimeoutOption, read_timeout
from kvtier_sdk.cli.tier.selection import Faults, Selection, model_of
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.options.tier import BoundedTierConfig
from kvtier_sdk.runner.survey import contents_in_words
from kvtier_sdk.types import Capability, Usage

_TITLES = ("MODEL", "NAMESPACES", "CHUNKS", "BYTES", "SHARE")


def du_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """Show how full tiers are, and which models use the space.

    For compressed chunks, the output also shows their uncompressed length, and the ratio. The
    command changes nothing, and does not disturb engines that use the tiers. For example

        kvtier tier du kv.toml

    The exit status is 1 if a tier could not be read.
    """
    target, timeout_s = read_target(tiers), read_timeout(timeout)
    faults = Faults(target)
    shown: list[dict[str, Any]] = []
    for spec in target.config.tiers:
        with faults.of(spec):
            found: list[Contents] = []
            for one in Selection().of(spec, timeout_s):
                with faults.of(spec):
                    found.append(Contents.of(spec, one, timeout_s))
            usage = None
            if found and Capability.USAGE in spec.tier_class.capabilities:
                with open_for_maintenance(spec, found[0].namespace, timeout_s=timeout_s) as tier:
                    usage = tier.usage()
            shown.append(_as_json(spec, found, usage))
            if not as_json:
                _show(shown[-1], usage)
        if not as_json:
            faults.show(spec)
    if as_json:
        faulty = [{"name": name, "fault": fault} for name, fault in faults.by_tier.items()]
        print(json.dumps({"ok": not faults.by_tier, "tiers": shown + faulty}))
    faults.end()


def _as_json(spec: TierSpec, found: list[Contents], usage: Usage | None) -> dict[str, Any]:
    by_model: dict[str, list[Contents]] = {}
    for contents in found:
        if contents.chunks:
            by_model.setdefault(model_of(contents.namespace), []).append(contents)
    capacity_bytes = None
    if usage is not None:
        capacity_bytes = usage.capacity_bytes
    elif isinstance(spec.config, BoundedTierConfig):
        capacity_bytes = spec.config.capacity_bytes
    return {
        "name": spec.name,
        "backend": spec.backend,
        **_totals(found),
        "capacity_bytes": capacity_bytes,
        "free_bytes": None if usage is None else usage.free_bytes,
        "store_bytes": None if usage is None else usage.used_bytes,
        "models": [
            {"model": model, "namespaces": len(of_model), **_totals(of_model)}
            for model, of_model in by_model.items()
        ],
        "fault": None,
    }


def _totals(found: list[Contents]) -> dict[str, float | None]:
    plain = [contents.plain_bytes for contents in found if contents.chunks]
    plain_bytes = None if None in plain else sum(filter(None, plain))
    return {
        "chunks": sum(contents.chunks for contents in found),
        **sizes_as_json(sum(contents.used_bytes for contents in found), plain_bytes),
    }


def _show(tier: dict[str, Any], usage: Usage | None) -> None:
    chunks, used_bytes = tier["chunks"], tier["bytes"]
    counted = Usage(chunks, used_bytes, None)
    if usage is None:
        used = contents_in_words(replace(counted, capacity_bytes=tier["capacity_bytes"]))
    elif usage.used_bytes == used_bytes:
        used = contents_in_words(replace(usage, chunks=chunks))
    else:
        used = f"{contents_in_words(counted)}; the store holds {contents_in_words(usage)}"
    say(f"tier {tier['name']!r}: {used}")
    rows = [
        (
            model["model"],
            f"{model['namespaces']:,}",
            f"{model['chunks']:,}",
            sizes_in_words(model["bytes"], model["plain_bytes"]),
            share(model["bytes"], used_bytes),
        )
        for model in tier["models"]
    ]
    if rows:
        print_columns([_TITLES, *rows], 1)
