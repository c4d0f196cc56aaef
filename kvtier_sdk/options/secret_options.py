"""Secrets that options name: ``password = "${NAME}"``, ``password_file = "/path"``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.model import StrictModel, accepts
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.secret_sources import VARIABLE, FileSecret, SourcedSecret, VariableSecret


def read_secrets(
    model: type[StrictModel],
    options: Mapping[str, Any],
    place: Place,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Put secrets in the place of the variables and files that hold them.

    Args:
        model: has the secrets.
        options: of the model, not validated yet.
        place: of the options.
        variables: in the place of those of the environment.

    Returns:
        The options, as the model knows them.

    Raises:
        ConfigError: a line with the place of an option whose secret cannot be read. It names the
            variable or the file, and shows no value.
    """
    read = dict(options)
    fields = dict(zip(model.option_names(), model.model_fields.values(), strict=True))
    found: dict[str, SourcedSecret] = {}
    for name, file_option in model.secret_files().items():
        path, value = read.pop(file_option, None), read.get(name)
        if path is not None and value is not None:
            raise ConfigError(f"{place.at(file_option)} is given beside {name!r}; leave one out")
        if path is not None:
            found[name] = _in_file(path, place.at(file_option))
        elif isinstance(value, str) and VARIABLE.search(value):
            found[name] = _in_variable(value, place.at(name), file_option, variables)
    for name, secret in found.items():
        keeps_source = accepts(fields[name].annotation, SecretStr)
        read[name] = secret if keeps_source else secret.get_secret_value()
    return read


def _in_variable(
    written: str, place: Place, file_option: str, variables: Mapping[str, str] | None
) -> VariableSecret:
    found = VARIABLE.fullmatch(written)
    if found is None:
        raise ConfigError(
            f"{place} has a variable among other characters; write the variable alone, or the "
            f"secret into a file that {file_option!r} names"
        )
    # A local variable with the whole environment would be in the frames of a traceback.
    value = (os.environ if variables is None else variables).get(found[1])
    if not value:
        fault = "is not set" if value is None else "is empty"
        raise ConfigError(f"{place}: variable {found[1]!r} of the environment {fault}")
    return VariableSecret(found[1], value)


def _in_file(path: object, place: Place) -> FileSecret:
    # What is no path may be the secret itself, by mistake.
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{place} should be the absolute path of a file")
    try:
        return FileSecret(path)
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except ValueError as error:
        fault = str(error)
    raise ConfigError(f"{place}: {path} {fault}")
