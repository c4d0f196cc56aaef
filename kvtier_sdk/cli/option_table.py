"""Descriptions of options: kind of value, unit, default and meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic_core import to_jsonable_python

from kvtier_sdk.options import units
from kvtier_sdk.options.model import StrictModel
from kvtier_sdk.options.secrets import MASK

#: The kind and the unit of each parser's values.
_PARSERS: Mapping[Callable[[object], Any], tuple[str, str | None]] = {
    units.parse_bytes: ("size", "bytes"),
    units.parse_bytes_or_share: ("size or share", "bytes, or a share from 0 to 1"),
    units.parse_seconds: ("duration", "seconds"),
    units.parse_share: ("share", "0 to 1"),
}
_TYPES = {
    "bool": "flag",
    **dict.fromkeys(("Path", "SecretStr", "str"), "text"),
    **dict.fromkeys(("float", "int"), "number"),
    **dict.fromkeys(("Mapping", "dict"), "table"),
    **dict.fromkeys(("list", "tuple"), "list"),
}
_ATTRIBUTES = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """The description of one option. ``default`` is plain data, and never shows a secret."""

    name: str
    kind: str
    unit: str | None
    choices: Sequence[str]
    required: bool
    default: Any
    secret: bool
    meaning: str
    is_live: bool = False


def describe_options(model: type[StrictModel]) -> list[OptionInfo]:
    """Describe a model's options. Each secret is followed by the option for the secret's file."""
    meanings, secrets, files = _meanings(model), model.secret_names(), model.secret_files()
    live = model.live_options()
    described = []
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        meaning = field.description or meanings.get(attribute, "")
        required, secret = field.is_required(), name in secrets
        default = None if required else field.get_default(call_default_factory=True)
        plain = to_jsonable_python(default, fallback=str)
        if secret and default is not None:
            plain = MASK
        kind, unit, choices = _kind_of(field.annotation, field.metadata)
        described.append(
            OptionInfo(name, kind, unit, choices, required, plain, secret, meaning, name in live)
        )
        if name in files:
            meaning = f"file that holds `{name}`, in its place"
            described.append(OptionInfo(files[name], "text", None, (), False, None, False, meaning))
    return described


def _kind_of(annotation: Any, metadata: Sequence[Any]) -> tuple[str, str | None, Sequence[str]]:
    """Return the kind, the unit and the choices of an option's values."""
    for part in [*metadata, *getattr(annotation, "__metadata__", ())]:
        if isinstance(part, BeforeValidator) and part.func in _PARSERS:
            return (*_PARSERS[part.func], ())  # type: ignore[index]
    origin = get_origin(annotation)
    if origin is Literal:
        return "choice", None, [str(choice) for choice in get_args(annotation)]
    if hasattr(annotation, "__metadata__"):
        return _kind_of(annotation.__origin__, ())
    if origin in (Union, UnionType):
        kinds = [_kind_of(one, ()) for one in get_args(annotation) if one is not NoneType]
        if len(kinds) == 1:
            return kinds[0]
        return " or ".join(kind for kind, _, _ in kinds), None, ()
    name = getattr(origin or annotation, "__name__", str(annotation))
    return _TYPES.get(name, name), None, ()


def _meanings(model: type[StrictModel]) -> dict[str, str]:
    """Read the options' meanings from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        section = _ATTRIBUTES.search(inspect.cleandoc(vars(owner).get("__doc__") or ""))
        if section is not None:
            for name, prose in _ATTRIBUTE.findall(section[1]):
                found[name] = " ".join(prose.split()).replace("``", "`").removesuffix(".")
    return found
