"""The base class of all options, and the validation of options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.place import Place, brief, nearest
from kvtier_sdk.options.secret_sources import (
    FILE_SUFFIX,
    FileSecret,
    VariableSecret,
    secret_in_file,
    secret_in_variable,
)
from kvtier_sdk.options.secrets import MASK, Secrets, masked, secret_among, secrets_in

_SECRETS = frozenset({SecretStr, SecretBytes})

T = TypeVar("T")
LIVE = "live"
#: The type of an option that an operator may change at run time. Do not keep copies of its value.
Live = Annotated[T, LIVE]


class StrictModel(BaseModel):
    """A model of options that rejects unknown names. Build it with :func:`validate_options`.

    An operator writes a quantity with its unit (``capacity: "4GiB"``). The attribute is a plain
    number, so its name ends in the unit: ``capacity_bytes: Bytes = Field(alias="capacity")``.

    Secrets appear neither in messages nor in a ``repr``. An option is a secret if its type is
    ``SecretStr`` or its name contains a word such as ``password``, ``secret`` or ``token``.
    An operator writes a secret in the clear, as an environment variable ``${NAME}``, or in a file
    (option ``password_file``). The SDK reads the file of a ``SecretStr`` again after a store
    refuses the secret, so call ``get_secret_value()`` for each connection.

    Attributes:
        needs: pairs of attributes; the first attribute of a pair requires the second.
        excludes: pairs of attributes that cannot be given together.
        refuses: other tiers' options that this model rejects, each with advice for the operator.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    # The configured value of each live option that has changed, by attribute.
    _configured: dict[str, Any] = {}

    needs: ClassVar[Sequence[tuple[str, str]]] = ()
    excludes: ClassVar[Sequence[tuple[str, str]]] = ()
    refuses: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for pairs, given, fault in (
            (self.needs, False, "is given without"),
            (self.excludes, True, "cannot be used beside"),
        ):
            for name, other in pairs:
                if getattr(self, name) and bool(getattr(self, other)) is given:
                    option, another = self._option(name), self._option(other)
                    raise ValueError(f"option {option!r} {fault} {another!r}")
        return self

    @classmethod
    def _option(cls, attribute: str) -> str:
        return cls.model_fields[attribute].alias or attribute

    @classmethod
    @cache
    def fields_by_option(cls) -> Mapping[str, FieldInfo]:
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def option_names(cls) -> Sequence[str]:
        """Return the names of all options, in the order of declaration."""
        return list(cls.fields_by_option())

    @classmethod
    @cache
    def types_by_option(cls) -> Mapping[str, set[Any]]:
        """Map each option's name to its type and all nested types."""
        types = {}
        for name, field in cls.fields_by_option().items():
            parts: list[Any] = [field.annotation]
            for part in parts:  # the loop appends to the list
                parts += get_args(part)
            types[name] = set(parts)
        return types

    @classmethod
    @cache
    def secret_names(cls) -> frozenset[str]:
        types = cls.types_by_option()
        return frozenset(secret_among(types)).union(
            name for name, its_types in types.items() if not its_types.isdisjoint(_SECRETS)
        )

    @classmethod
    @cache
    def secret_files(cls) -> Mapping[str, str]:
        """Map each secret option to the option that names its file, such as ``password_file``."""
        types = cls.types_by_option()
        return {
            name: file
            for name in types
            if name in cls.secret_names()
            and not types[name].isdisjoint({str, *_SECRETS})
            and (file := f"{name}{FILE_SUFFIX}") not in types
        }

    @classmethod
    @cache
    def live_options(cls) -> Mapping[str, str]:
        return {
            field.alias or name: name
            for name, field in cls.model_fields.items()
            if LIVE in field.metadata
        }

    def changed(
        self, changes: Mapping[str, Any], place: Place, also_known: Iterable[str] = ()
    ) -> Self:
        """Return a copy with ``changes`` applied.

        Raise a :class:`ConfigError` at ``place`` if a value is wrong, or if an option to change is
        in this model or in ``also_known``, but is not live.
        """
        known = {*self.option_names(), *also_known}
        if fixed := sorted(known & changes.keys() - self.live_options().keys()):
            names = ", ".join(place.at(option).path for option in fixed)
            raise ConfigError(f"{place} a restart of the engine is needed to change {names}")
        given = {self._option(name): getattr(self, name) for name in self.model_fields_set}
        return validate_options(type(self), given | dict(changes), place, also_known)

    def set_live(self, changed: Self) -> dict[str, tuple[Any, Any]]:
        """Copy the live options from ``changed``; return the old and new value of each change."""
        values = {n: (getattr(self, n), getattr(changed, n)) for n in self.live_options().values()}
        changes = {name: (was, now) for name, (was, now) in values.items() if was != now}
        self._configured = {name: was for name, (was, _) in changes.items()} | self._configured
        self.__dict__.update({name: now for name, (_, now) in changes.items()})
        # Mark the options as set, so that a process started later gets them.
        self.model_fields_set.update(changes)
        return changes

    def live_values(self) -> dict[str, tuple[Any, Any]]:
        """Return the configured and the current value of each live option, as plain data."""
        old, plain = self.model_copy(update=self._configured), to_jsonable_python
        return {
            option: (plain(getattr(old, name)), plain(getattr(self, name)))
            for option, name in self.live_options().items()
        }

    @classmethod
    def take_from(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Remove this model's options from ``options``, and return them."""
        return {name: options.pop(name) for name in cls.fields_by_option() if name in options}

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """Return the options as plain data, with quantities in bytes and seconds.

        A secret from a file or the environment is written as a reference to its source. Other
        secrets are written as ``"***"``, or in the clear if ``secrets`` is true. Options that were
        not given are included only if ``defaults`` is true.
        """

        def plain(value: Any) -> Any:
            if isinstance(value, SecretStr | SecretBytes):
                return value.get_secret_value() if secrets else MASK
            if isinstance(value, set | frozenset):
                # Sort the set, because its order differs between processes.
                return sorted(value, key=str)
            return to_jsonable_python(value)

        options: dict[str, Any] = {}
        for name, value in self.model_dump(by_alias=True, exclude_unset=not defaults).items():
            if isinstance(value, VariableSecret | FileSecret):
                source, written = value.written(name)
                options[source] = written
                continue
            options[name] = json.loads(json.dumps(value, default=plain))
            if not secrets and value is not None:
                is_hidden = name in self.secret_names()
                options[name] = MASK if is_hidden else masked(name, options[name])
        return options

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(name or "", value)


def secrets_of(options: StrictModel) -> Secrets:
    """Return the secrets in a model's options, including those in tables and in URLs."""
    return _secrets_in(options, options.model_dump(by_alias=True))


def _secrets_in(model: StrictModel | type[StrictModel], options: Mapping[str, Any]) -> Secrets:
    hidden = model.secret_names()
    values = (
        secret
        for name, value in options.items()
        for secret in secrets_in("secret" if name in hidden else name, value)
    )
    return Secrets(values, [value for value in options.values() if isinstance(value, FileSecret)])


Model = TypeVar("Model", bound=StrictModel)

#: Plain words for expected values, because pydantic's words are for Python programmers.
_PLAIN = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "a whole number"),
    **dict.fromkeys(("dict_type", "mapping_type"), "a table"),
    "invalid-json-value": "text, a number, true or false, or a list or table of them",
    "string_type": "text",
}


def validate_options(
    model: type[Model], options: Mapping[str, Any], place: Place, also_known: Iterable[str] = ()
) -> Model:
    """Build a ``model`` from ``options``, or raise a :class:`ConfigError` with a line per mistake.

    A mistake is an unknown or missing option, a wrong value, or an unreadable secret. Each
    line begins with the ``place`` of the option, and shows no secret. An error for an unknown
    option suggests names from the model and from ``also_known``.
    """
    given = _with_secrets(model, options, place)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = error.errors()
    # Raise outside the handler, because pydantic's error in a traceback would show secrets.
    known = [*model.option_names(), *model.secret_files().values(), *also_known]
    mask = _secrets_in(model, given).mask
    raise ConfigError("\n".join(_complaint(fault, place, known, model, mask) for fault in faults))


def _with_secrets(
    model: type[StrictModel], options: Mapping[str, Any], place: Place
) -> dict[str, Any]:
    read = dict(options)
    for name, file_option in model.secret_files().items():
        path, value = read.pop(file_option, None), read.get(name)
        secret: VariableSecret | FileSecret | None = None
        if path is not None:
            if value is not None:
                raise ConfigError(
                    f"{place.at(file_option)} is given beside {name!r}; leave one out"
                )
            secret = secret_in_file(path, place.at(file_option))
        elif isinstance(value, str):
            secret = secret_in_variable(value, place.at(name))
        if secret is not None:
            keeps_source = SecretStr in model.types_by_option()[name]
            read[name] = secret if keeps_source else secret.get_secret_value()
    return read


def _complaint(
    fault: ErrorDetails,
    place: Place,
    known: list[str],
    model: type[StrictModel],
    mask: Callable[[str], str],
) -> str:
    loc = fault["loc"]
    option = place.at(*loc)
    if fault["type"] == "extra_forbidden":
        if loc[-1] in model.refuses:
            return f"{option}: {model.refuses[str(loc[-1])]}"
        suggestion = nearest(str(loc[-1]), known, "allowed")
        return f"{place.where}: unknown option {option.path!r}; {suggestion}"
    if fault["type"] == "missing":
        return f"{option} is missing"
    if loc and (loc[0] in model.secret_names() or secret_among(map(str, loc))):
        return f"{option} has a value that is not allowed; it is a secret and not shown"
    # Mask the value before shortening it, because half a secret would not be recognized.
    value = mask(repr(fault["input"])) if loc else ""
    message = mask(fault["msg"].removeprefix("Value error, ").removeprefix("Input should be "))
    if fault["type"] != "value_error":
        return f"{option} is {brief(value)} but should be {_PLAIN.get(fault['type'], message)}"
    if loc:
        return f"{option}: {message.replace(value, brief(value))}"
    # Add the path, because a model's validators do not know it.
    if place.path:
        message = message.replace("option '", f"option '{place.path}.")
    return f"{place.where}: {message}"
