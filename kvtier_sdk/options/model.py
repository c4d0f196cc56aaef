"""Strict options: a misspelt name and a wrong value are errors that say what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    SecretBytes,
    SecretStr,
    ValidationError,
    model_validator,
)

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.secrets import (
    MASK,
    is_secret,
    masked,
    secrets_in,
    without_password,
)


class StrictModel(BaseModel):
    """Options in which a misspelt name is an error. Build one with :func:`validate_options`.

    A quantity's option is written with its unit (``capacity: "4GiB"``), its attribute names the
    unit: declare ``capacity_bytes: Bytes = Field(alias="capacity")``.

    A secret is shown neither in a message nor by ``repr``: an option of type ``SecretStr``, and
    one whose name has a word such as ``password``, ``secret`` or ``token``.

    Attributes:
        needs: pairs of attributes; the first, when it is given, needs the second beside it.
        excludes: pairs of attributes that cannot be given together.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    needs: ClassVar[Sequence[tuple[str, str]]] = ()
    excludes: ClassVar[Sequence[tuple[str, str]]] = ()

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for name, needed in self.needs:
            if getattr(self, name) and not getattr(self, needed):
                one, other = self._option(name), self._option(needed)
                raise ValueError(f"option {one!r} is given without {other!r}")
        for name, excluded in self.excludes:
            if getattr(self, name) and getattr(self, excluded):
                one, other = self._option(name), self._option(excluded)
                raise ValueError(f"option {one!r} cannot be used beside {other!r}")
        return self

    @classmethod
    def _option(cls, name: str) -> str:
        return cls.model_fields[name].alias or name

    @classmethod
    def option_names(cls) -> list[str]:
        """The names under which options are given, in the order of their declaration."""
        return [cls._option(name) for name in cls.model_fields]

    @classmethod
    def secret_names(cls) -> set[str]:
        """The names of the options whose values are never shown."""
        return {
            name
            for name, field in zip(cls.option_names(), cls.model_fields.values(), strict=True)
            if is_secret(name) or _holds_secret(field.annotation)
        }

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """The options that were given, as plain data that can be read again.

        Args:
            secrets: whether to give them away; else they are ``"***"``.
            defaults: whether to name those too that were not given.

        Returns:
            Option name to value, quantities in bytes and seconds.
        """
        given = self.model_dump(mode="json", by_alias=True, exclude_unset=not defaults)
        for option, name in zip(self.option_names(), type(self).model_fields, strict=True):
            value = getattr(self, name)
            if option not in given or value is None:
                continue
            if not secrets:
                hidden = option in self.secret_names()
                given[option] = MASK if hidden else masked(option, given[option])
            elif isinstance(value, SecretStr):
                given[option] = value.get_secret_value()
        return given

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(name or "", value)


def _holds_secret(annotation: Any) -> bool:
    return annotation in (SecretStr, SecretBytes) or any(map(_holds_secret, get_args(annotation)))


Model = TypeVar("Model", bound=StrictModel)

#: Faults that pydantic tells in words of Python.
_PLAIN = {"string_type": "text", "mapping_type": "a table", "dict_type": "a table"}
_KINDS: tuple[tuple[type, str], ...] = (
    (Mapping, "a table"),
    (list, "a list"),
    (str, "text"),
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
)


def validate_options(
    model: type[Model],
    options: Mapping[str, Any],
    *,
    where: str,
    path: str = "",
    also_known: Iterable[str] = (),
) -> Model:
    """Build a model from options, or say what is wrong with them.

    Args:
        model: the class to build.
        options: option name to value.
        where: what these options belong to, with which each complaint begins.
        path: of the options inside of that, ``tiers[1]``; empty at its root.
        also_known: names that are allowed beside the model's own, to be suggested too.

    Returns:
        The validated model.

    Raises:
        ConfigError: one line a fault: an unknown name with the closest known one, a missing
            option, a value of the wrong kind. Secrets are not in it.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        known = [*model.option_names(), *also_known]
        hidden = [
            secret
            for name, value in options.items()
            for secret in secrets_in("secret" if name in model.secret_names() else name, value)
        ]
        complaints = [
            f"{where}: {_complaint(dict(fault), path, known, model.secret_names(), hidden)}"
            for fault in error.errors()
        ]
        raise ConfigError("\n".join(complaints)) from None


def _complaint(
    fault: Mapping[str, Any], path: str, known: list[str], secret_names: set[str], hidden: list[str]
) -> str:
    loc = fault["loc"]
    option = f"option {option_path(path, *loc)!r}"
    if fault["type"] == "extra_forbidden":
        return f"unknown {option}; {nearest(str(loc[-1]), known, 'allowed')}"
    if fault["type"] == "missing":
        return f"{option} is missing"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if loc and (loc[0] in secret_names or any(is_secret(str(part)) for part in loc)):
        return f"{option} has a value that is not allowed; it is a secret and not shown"
    value = masked(str(loc[-1]), fault["input"]) if loc else None
    if fault["type"] != "value_error":
        message = _PLAIN.get(fault["type"], message)
        return f"{option} is {value!r} but should be {message}"
    # A rule's own words may quote any option, most often its own.
    if loc:
        message = message.replace(repr(fault["input"]), repr(value))
    for secret in sorted(hidden, key=len, reverse=True):
        message = message.replace(secret, MASK).replace(repr(secret)[1:-1], MASK)
    message = without_password(message)
    if loc:
        return f"{option}: {message}"
    # A rule about several options names them itself, without knowing where they stand.
    return message.replace("option '", f"option '{path}.") if path else message


def option_path(*parts: str | int) -> str:
    """The path of an option: ``tiers[1].capacity``.

    Args:
        parts: paths, names and indices, from the root; an empty one is left out.

    Returns:
        Them in one.
    """
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part:
            path += f".{part}" if path else part
    return path


def kind_of(value: object) -> str:
    """What a value in a file is, for people: ``a list``."""
    if value is None:
        return "nothing"
    for kind, name in _KINDS:
        if isinstance(value, kind):
            return name
    return f"a {type(value).__name__}"


def nearest(word: str, known: Iterable[str], label: str) -> str:
    """Finish a complaint about an unknown word: what is known, and the closest of it.

    Args:
        word: what was written.
        known: what could have been written.
        label: what to call the known ones: "allowed", "installed".

    Returns:
        For example ``did you mean 'capacity'? allowed: capacity, root``.
    """
    names = sorted(known)
    listing = f"{label}: {', '.join(names) if names else 'none'}"
    close = closest(word, names)
    return f"did you mean {close!r}? {listing}" if close else listing


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that an unknown one is most like, if any is."""
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return close[0] if close else None
