"""``kvtier tier ls``: lists the namespaces in tiers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, read_target
from kvtier_sdk.cli.terminal import JsonOption, print_columns, say
from kvtier_sdk.cli.tier.contents import Contents, sizes_in_words
from kvtier_sdk.cli.tier.options import ModelOption, NamespaceOption, TimeoutOption, read_timeout
from kvtier_sdk.cli.tier.selection import SHOWN_DIGITS, Faults, Selection, model_of
from kvtier_sdk.options.units import format_seconds

_TITLES = ("NAMESPACE", "MODEL", "REVISION", "CHUNKS", "BYTES", "OLDEST USE", "LAST USE")


def ls_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    show_empty: Annotated[
        bool, typer.Option("--all", help="Show namespaces without chunks too.")
    ] = False,
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """List the namespaces in tiers, each with its model, chunks, bytes and ages.

    Nothing is changed, and engines that use the tiers are not disturbed. For example

        kvtier tier ls file:///data/kv

    For compressed chunks, the output also shows their length when loaded, and the ratio. In a
    bucket, which records no uses, ages count from the time of storing. The exit status is 1 if a
    tier could not be read.
    """
    target, timeout_s = read_target(tiers), read_timeout(timeout)
    selection = Selection.read(namespace, model)
    now_s = SystemClock().wall_s()
    faults = Faults(target)
    listed: list[dict[str, Any]] = []
    for spec in target.config.tiers:
        found: list[Contents] = []
        with faults.of(spec):
            for one in selection.of(spec, timeout_s):
                with faults.of(spec):
                    found.append(Contents.of(spec, one, timeout_s))
        listed.append(
            {
                "name": spec.name,
                "backend": spec.backend,
                "namespaces": [contents.as_json() for contents in found],
                "fault": faults.by_tier.get(spec.name),
                "note": faults.notes.get(spec.name),
            }
        )
        if not as_json:
            if len(target.config.tiers) > 1:
                say(f"tier {spec.name!r}")
            if found or spec.name not in faults.by_tier | faults.notes:
                _show(found, now_s, show_empty=show_empty)
            faults.show(spec)
    if as_json:
        print(json.dumps({"ok": not faults.by_tier, "tiers": listed}))
    faults.end()


def _show(found: list[Contents], now_s: float, *, show_empty: bool) -> None:
    shown = [contents for contents in found if contents.chunks or show_empty]
    rows = [
        (
            contents.namespace.fingerprint[:SHOWN_DIGITS],
            model_of(contents.namespace),
            # Shorten the revision, because it can be a long commit id.
            str(contents.namespace.facts.get("model_revision") or "-")[:SHOWN_DIGITS],
            f"{contents.chunks:,}",
            sizes_in_words(contents.used_bytes, contents.plain_bytes),
            *(
                "-" if then_s is None else format_seconds(max(0, round(now_s - then_s)))
                for then_s in (contents.oldest_s, contents.last_used_s)
            ),
        )
        for contents in shown
    ]
    if rows:
        print_columns([_TITLES, *rows], 3)
    if hidden := len(found) - len(shown):
        say(f"{hidden} without chunks (--all shows them)")
    elif not found:
        say("no namespace")
