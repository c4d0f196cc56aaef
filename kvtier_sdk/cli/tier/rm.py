"""``kvtier tier rm``: deletes chunks by namespace, model and age."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.cli.engine import purge_pools, tell_purge
from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, read_target
from kvtier_sdk.cli.terminal import JsonOption, progress, read_flag, say
from kvtier_sdk.cli.tier.contents import Contents
from kvtier_sdk.cli.tier.maintenance import open_for_maintenance, pages
from kvtier_sdk.cli.tier.options import ModelOption, NamespaceOption, TimeoutOption, read_timeout
from kvtier_sdk.cli.tier.selection import Faults, Selection, named
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.units import format_bytes, parse_seconds
from kvtier_sdk.types import Capability, OffloadKey


def rm_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    unused_for: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Only chunks that were not used for so long: '30d'. In a bucket, that were stored "
            "so long ago.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every chunk of every namespace.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """Delete chunks from tiers, by namespace, model and age, after counting them and asking.

    Engines that use the tiers recompute the deleted chunks. Without --unused-for, the engines at
    the configuration's admin_socket empty their host pools too. For example

        kvtier tier rm kv.toml --model llama-2 --unused-for 30d

    The exit status is 1 if a tier could not be read, or if some chunks were not deleted.
    """
    target, timeout_s = read_target(tiers), read_timeout(timeout)
    selection = Selection.read(namespace, model)
    unused_s = None if unused_for is None else read_flag("--unused-for", parse_seconds, unused_for)
    if selection == Selection() and unused_s is None and not everything:
        raise ConfigError(
            "say which chunks to delete: give --namespace, --model or --unused-for, or --all for "
            "every chunk"
        )
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give --yes")
    before_s = None if unused_s is None else SystemClock().wall_s() - unused_s
    faults = Faults(target)
    found: list[_Victims] = []
    meant: set[str] = set()
    for spec in target.config.tiers:
        with faults.of(spec):
            for one in selection.of(spec, timeout_s):
                meant.add(one.fingerprint)
                with faults.of(spec):
                    victims = _find(spec, one, before_s, timeout_s)
                    if victims.keys:
                        found.append(victims)
    say(*_lines(found), to_stderr=as_json)
    in_pools = unused_s is None and bool(meant)
    if found and not yes:
        typer.confirm("Delete them?", abort=True, err=as_json)
    # Purge first, because a pool could still store chunks after the deletion.
    before = purge_pools(target.config, meant) if in_pools else []
    for victims in found:
        _delete(victims, faults, timeout_s)
    # Purge again, because engines may have loaded chunks before the deletion.
    purged = purge_pools(target.config, meant, before) if in_pools else []
    if as_json:
        removed = [victims.as_json() for victims in found]
        report = {"ok": not faults.by_tier, "removed": removed, "engines": purged}
        print(json.dumps(report | {"faults": faults.by_tier}))
    else:
        say(f"{sum(victims.deleted for victims in found):,} chunks deleted")
        say(*(tell_purge(target.config, purged) if in_pools else ()))
        faults.show(*target.config.tiers)
    faults.end()


@dataclass(slots=True)
class _Victims:
    spec: TierSpec
    contents: Contents
    keys: list[OffloadKey]
    kept: int = 0
    deleted: int = 0

    def as_json(self) -> dict[str, Any]:
        counted = self.contents.as_json()
        del counted["facts"], counted["manifest_fault"]
        return {"tier": self.spec.name, **counted, "kept": self.kept, "deleted": self.deleted}


def _find(
    spec: TierSpec, namespace: Namespace, before_s: float | None, timeout_s: float
) -> _Victims:
    victims = _Victims(spec, Contents(namespace), [])
    with open_for_maintenance(spec, namespace, timeout_s=timeout_s) as tier:
        tier.need(Capability.DELETE, "delete chunks")
        for entry in tier.entries():
            # Keep chunks of unknown age, because they may have been used recently.
            if before_s is None or (entry.used_s is not None and entry.used_s < before_s):
                victims.contents.add(entry.object_bytes, entry.used_s)
                victims.keys.append(entry.key)
            else:
                victims.kept += 1
    return victims


def _lines(found: list[_Victims]) -> Iterator[str]:
    for victims in found:
        contents = victims.contents
        kept = f"; {victims.kept:,} stay" if victims.kept else ""
        yield (
            f"tier {victims.spec.name!r}, namespace {named(contents.namespace)}: "
            f"{contents.chunks:,} chunks, {format_bytes(contents.used_bytes)}{kept}"
        )
    if not found:
        yield "nothing matches: no chunk is deleted"


def _delete(victims: _Victims, faults: Faults, timeout_s: float) -> None:
    with (
        faults.of(victims.spec),
        open_for_maintenance(victims.spec, victims.contents.namespace, timeout_s=timeout_s) as tier,
        progress("delete", len(victims.keys)) as step,
    ):
        for part in pages(victims.keys):
            tier.delete(part)
            victims.deleted += len(part)
            step(len(part))
