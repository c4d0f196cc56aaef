"""``kvtier backends``: lists the installed backends and their options."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier_sdk.cli.option_table import OptionInfo, describe_options
from kvtier_sdk.cli.terminal import JsonOption, say
from kvtier_sdk.contract import CONTRACT_VERSION
from kvtier_sdk.errors import BackendError
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.registry import (
    BackendInfo,
    available_backends,
    load_backend,
    unknown_backend,
    url_schemes,
)


def backends_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Show only these backends.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the installed backends, each with its package, abilities and options.

    If a backend cannot be loaded, the list shows the reason, and the exit status is 1.
    """
    wanted = [info for info in available_backends() if not names or info.name in names]
    known = {info.name for info in wanted}
    for name in names or ():
        if name not in known:
            raise unknown_backend(name)
    described = list(map(_describe, wanted))
    if as_json:
        common = [asdict(option) for option in describe_options(RunnerOptions)]
        found = {"contract_version": CONTRACT_VERSION, "backends": described}
        print(json.dumps(found | {"options_of_every_tier": common}))
    else:
        _show(described)
    if any(backend["fault"] for backend in described):
        raise typer.Exit(1)


def _describe(info: BackendInfo) -> dict[str, Any]:
    described: dict[str, Any] = {**asdict(info), "url_schemes": url_schemes(info), "fault": None}
    try:
        tier_class = load_backend(info.name)
    except BackendError as error:
        return described | {"fault": str(error)}
    return described | {
        "summary": (inspect.getdoc(tier_class) or "").partition("\n\n")[0].replace("\n", " "),
        "contract_version": tier_class.contract_version,
        "medium": tier_class.medium.value,
        "locality": tier_class.locality.value,
        "alignment": tier_class.alignment,
        "needs_process": tier_class.needs_process,
        "max_batch_keys": tier_class.max_batch_keys,
        "runner_defaults": dict(tier_class.runner_defaults),
        "capabilities": [f"{one.name}".lower() for one in tier_class.capabilities],
        "options": [asdict(option) for option in describe_options(tier_class.config_model)],
    }


def _show(described: Sequence[Mapping[str, Any]]) -> None:
    for backend in described:
        say(f"{backend['name']}  {backend['distribution']} {backend['version']}")
        if backend["fault"]:
            say(f"  cannot be used: {backend['fault']}", "")
            continue
        capabilities = ", ".join(backend["capabilities"]) or "no optional capability"
        schemes = ", ".join(f"{scheme}:" for scheme in backend["url_schemes"])
        say(
            f"  {backend['summary']}",
            f"  contract {backend['contract_version']}; {backend['medium'].lower()}, "
            f"{backend['locality'].lower()}; can: {capabilities}; URL: {schemes}",
            *(f"  {line}" for line in _declared(backend)),
        )
        _show_options([OptionInfo(**option) for option in backend["options"]])
    say("every tier")
    _show_options(describe_options(RunnerOptions))


def _declared(backend: Mapping[str, Any]) -> Iterator[str]:
    if backend["needs_process"]:
        yield "always runs in a process of its own"
    if backend["max_batch_keys"] is not None:
        yield f"at most {backend['max_batch_keys']} keys a call"
    if backend["runner_defaults"]:
        changed = ", ".join(f"{name}={value}" for name, value in backend["runner_defaults"].items())
        yield f"defaults of its own: {changed}"


def _show_options(options: Sequence[OptionInfo]) -> None:
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("  option", "type", "default"):
        table.add_column(title, no_wrap=True)
    table.add_column("")
    for option in options:
        kind = ("|".join(option.choices) or option.kind) + ", live" * option.is_live
        cells = (f"  {option.name}", kind, written_default(option), option.meaning)
        table.add_row(*map(one_line, cells))
    if options:
        # `say` would escape the line breaks of a wrapped table.
        Console(highlight=False, markup=False).print(table)
    say("")


def written_default(option: OptionInfo) -> str:
    """Format an option's default with its unit, for example ``64 MiB``."""
    if option.required:
        return "needed"
    if option.default is None:
        return "-"
    match option.kind, option.default:
        case ("share" | "size or share", float(share)):
            return f"{100 * share:g}%"
        case ("size" | "size or share", int(size_bytes)):
            return format_bytes(size_bytes)
        case ("duration", int(value) | float(value)):
            return f"{value:g} s"
        case (_, bool() | list() | dict() as value):
            return json.dumps(value)
    return str(option.default)
