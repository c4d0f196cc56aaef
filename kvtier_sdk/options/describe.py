"""Options told to people: what kind of value each takes, its unit, default and meaning."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, SecretStr
from pydantic.fields import FieldInfo

from kvtier_sdk.options import units
from kvtier_sdk.options.model import StrictModel
from kvtier_sdk.options.secrets import MASK

#: What reads an option's value to how such values are called, and what they are counted in.
_PARSERS: Mapping[Callable[[object], Any], tuple[str, str | None]] = {
    units.parse_bytes: ("size", "bytes"),
    units.parse_bytes_or_share: ("size or share", "bytes, or a share from 0 to 1"),
    units.parse_seconds: ("duration", "seconds"),
    units.parse_share: ("share", "0 to 1"),
    units.parse_count: ("number", None),
    units.parse_flag: ("flag", None),
}
_TYPES = {
    "Mapping": "table",
    "Path": "text",
    "SecretStr": "text",
    "bool": "flag",
    "dict": "table",
    "float": "number",
    "int": "number",
    "list": "list",
    "str": "text",
    "tuple": "list",
}
_ATTRIBUTES = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option.

    Attributes:
        name: under which it is given.
        kind: ``"size"``, ``"duration"``, ``"text"``, ``"choice"``, ...
        unit: what its default is counted in, or ``None``.
        choices: the values that a choice has.
        required: whether it must be given.
        default: as plain data; a secret's is ``"***"``.
        secret: whether its value is never shown.
        meaning: one sentence; empty where the author wrote none.
    """

    name: str
    kind: str
    unit: str | None
    choices: Sequence[str]
    required: bool
    default: Any
    secret: bool
    meaning: str


def describe_options(model: type[StrictModel]) -> list[OptionInfo]:
    """Say what a model's options are.

    Args:
        model: the class of the options.

    Returns:
        Its options, in the order of their declaration. Their meaning comes from the field's
        ``description``, else from the section ``Attributes`` of the docstring.
    """
    meanings = _meanings(model)
    secrets = model.secret_names()
    return [
        _describe(option, field, meanings.get(name, ""), secret=option in secrets)
        for option, (name, field) in zip(
            model.option_names(), model.model_fields.items(), strict=True
        )
    ]


def _describe(option: str, field: FieldInfo, meaning: str, *, secret: bool) -> OptionInfo:
    kind, unit, choices = _kind_of(field.annotation, field.metadata)
    return OptionInfo(
        name=option,
        kind=kind,
        unit=unit,
        choices=choices,
        required=field.is_required(),
        default=None if field.is_required() else _default_of(field, secret),
        secret=secret,
        meaning=field.description or meaning,
    )


def _kind_of(annotation: Any, metadata: Sequence[Any]) -> tuple[str, str | None, Sequence[str]]:
    """How values are called, their unit, and what there is to choose from."""
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
        return (
            kinds[0] if len(kinds) == 1 else (" or ".join(kind for kind, _, _ in kinds), None, ())
        )
    name = getattr(origin or annotation, "__name__", str(annotation))
    return _TYPES.get(name, name), None, ()


def _default_of(field: FieldInfo, secret: bool) -> Any:
    default = field.get_default(call_default_factory=True)
    if default is None:
        return None
    if secret or isinstance(default, SecretStr):
        return MASK
    if isinstance(default, tuple | set | frozenset):
        return list(default)
    return default if isinstance(default, bool | int | float | str | list | dict) else str(default)


def _meanings(model: type[StrictModel]) -> dict[str, str]:
    """Attribute to the prose about it, a derived class's before its base's."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        section = _ATTRIBUTES.search(inspect.cleandoc(vars(owner).get("__doc__") or ""))
        if section is not None:
            for name, prose in _ATTRIBUTE.findall(section[1]):
                found[name] = " ".join(prose.split()).replace("``", "`").removesuffix(".")
    return found
