"""Options that several ``kvtier tier`` commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_sdk.cli.terminal import read_flag
from kvtier_sdk.options.units import parse_seconds

NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAMESPACE",
        help="Only this namespace: the beginning of its fingerprint, or a JSON file with its facts "
        "(a manifest.json).",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="TEXT",
        help="Only namespaces with this in a model's name, by a manifest that fits its namespace.",
    ),
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="Time limit of each call of a tier.")
]


def read_timeout(text: str) -> float:
    return read_flag("--timeout", parse_seconds, text)
