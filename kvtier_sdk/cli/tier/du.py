"""``kvtier tier du``: the usage of tiers, by model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, read_target
from kvtier_sdk.cli.terminal import JsonOption, print_columns, say, share
from kvtier_sdk.cli.tier.selection import (
    Contents,
    Faults,
    Selection,
    TimeoutOption,
    count,
    model_of,
    read_timeout,
)
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.opening.maintenance import open_for_maintenance
from kvtier_sdk.options.tier import BoundedTierConfig
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.survey import contents_in_words
from kvtier_sdk.types import Capability, Usage

_TITLES = ("MODEL", "NAMESPACES", "CHUNKS", "BYTES", "SHARE")
_NUMBERS = frozenset({1, 2, 3, 4})


def du_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """Show how full tiers are, and which models take the room.

    Nothing is changed, and engines that use the tiers are not disturbed. For example

        kvtier tier du kv.toml

    The exit status is 1 if a tier could not be read.
    """
    target, timeout_s = read_target(tiers), read_timeout(timeout)
    faults = Faults(target)
    shown: list[dict[str, Any]] = []
    for spec in target.tiers:
        with faults.of(spec):
            found: list[Contents] = []
            for one in Selection().of(spec, timeout_s):
                with faults.of(spec):
                    found.append(count(spec, one, timeout_s))
            use = _Use(found, _usage(spec, found, timeout_s))
            shown.append(use.as_json(spec))
            if not as_json:
                use.show(spec)
        if not as_json:
            faults.show(spec)
    if as_json:
        faulty = [{"name": name, "fault": fault} for name, fault in faults.by_tier.items()]
        print(json.dumps({"ok": not faults.by_tier, "tiers": shown + faulty}))
    faults.end()


def _usage(spec: TierSpec, found: list[Contents], timeout_s: float) -> Usage | None:
    """Return the store's own usage, which counts everything in it, if the tier can report it."""
    if Capability.USAGE not in spec.tier_class.capabilities or not found:
        return None
    with open_for_maintenance(spec, found[0].namespace, timeout_s=timeout_s) as tier:
        return tier.usage()


class _Use:
    def __init__(self, found: list[Contents], usage: Usage | None) -> None:
        self._found = found
        self._usage = usage
        self._chunks = sum(contents.chunks for contents in found)
        self._bytes = sum(contents.used_bytes for contents in found)
        self._models: dict[str, list[Contents]] = {}
        for contents in found:
            if contents.chunks:
                self._models.setdefault(model_of(contents.namespace), []).append(contents)

    def as_json(self, spec: TierSpec) -> dict[str, Any]:
        return {
            "name": spec.name,
            "backend": spec.backend,
            "chunks": self._chunks,
            "bytes": self._bytes,
            "capacity_bytes": self._capacity_bytes(spec),
            "free_bytes": None if self._usage is None else self._usage.free_bytes,
            "store_bytes": None if self._usage is None else self._usage.used_bytes,
            "models": [
                {
                    "model": model,
                    "namespaces": len(found),
                    "chunks": sum(contents.chunks for contents in found),
                    "bytes": sum(contents.used_bytes for contents in found),
                }
                for model, found in self._models.items()
            ],
            "fault": None,
        }

    def show(self, spec: TierSpec) -> None:
        found = Usage(self._chunks, self._bytes, None)
        if self._usage is None:
            used = contents_in_words(replace(found, capacity_bytes=self._capacity_bytes(spec)))
        elif self._usage.used_bytes == self._bytes:
            used = contents_in_words(replace(self._usage, chunks=self._chunks))
        else:
            used = f"{contents_in_words(found)}; the store holds {contents_in_words(self._usage)}"
        say(f"tier {spec.name!r}: {used}")
        rows = [
            (
                model["model"],
                f"{model['namespaces']:,}",
                f"{model['chunks']:,}",
                format_bytes(model["bytes"]),
                share(model["bytes"], self._bytes),
            )
            for model in self.as_json(spec)["models"]
        ]
        if rows:
            print_columns([_TITLES, *rows], _NUMBERS)

    def _capacity_bytes(self, spec: TierSpec) -> int | None:
        if self._usage is not None:
            return self._usage.capacity_bytes
        if isinstance(spec.config, BoundedTierConfig):
            return spec.config.capacity_bytes
        return None
