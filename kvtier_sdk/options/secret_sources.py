"""Secrets in files and in environment variables."""

from __future__ import annotations

import os
import re

from pydantic import SecretStr

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.place import Place

#: The suffix of the options that name a secret's file.
FILE_SUFFIX = "_file"

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_FILE_BYTES = 1 << 16
#: The environment variables from which this process has read secrets.
_named: set[str] = set()


class VariableSecret(SecretStr):
    """A secret in an environment variable. The processes of tiers do not inherit the variable."""

    def __init__(self, variable: str, value: str) -> None:
        super().__init__(value)
        self.variable = variable
        _named.add(variable)

    def written(self, name: str) -> tuple[str, str]:
        """Return the name and the value of the option that refers to the secret's source."""
        return name, f"${{{self.variable}}}"


class FileSecret(SecretStr):
    """A secret in a file. ``values`` lists all values read so far; the last is the current one.

    Reading raises OSError or ValueError if the file is unreadable or contains no secret.
    """

    def __init__(self, path: str) -> None:
        super().__init__(_read(path))
        self.path = path
        self.values = [self.get_secret_value()]

    def written(self, name: str) -> tuple[str, str]:
        return f"{name}{FILE_SUFFIX}", self.path

    def read_again(self) -> bool:
        """Read the file again; return true if the secret has changed."""
        value = _read(self.path)
        if value == self._secret_value:
            return False
        # Add the secret to ``values`` before using it, because only the secrets there are masked.
        self.values.append(value)
        self._secret_value = value
        return True


def secret_in_variable(written: str, place: Place) -> VariableSecret | None:
    """Return the secret that ``${NAME}`` refers to; return ``None`` for any other text."""
    found = _VARIABLE.search(written)
    if found is None:
        return None
    if found[0] != written:
        raise ConfigError(
            f"{place} has a variable among other characters; write the variable alone, or the "
            f"secret into a file that '{place.path}{FILE_SUFFIX}' names"
        )
    value = os.environ.get(found[1])
    if not value:
        fault = "is not set" if value is None else "is empty"
        raise ConfigError(f"{place}: variable {found[1]!r} of the environment {fault}")
    return VariableSecret(found[1], value)


def secret_in_file(path: object, place: Place) -> FileSecret:
    # Do not quote a value that is not a path, because it may be the secret itself.
    if not isinstance(path, str) or not path.startswith("/"):
        raise ConfigError(f"{place} should be the absolute path of a file")
    try:
        return FileSecret(path)
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except ValueError as error:
        fault = str(error)
    raise ConfigError(f"{place}: {path} {fault}")


def environment_without_secrets() -> dict[str, str]:
    """Return this process's environment without the variables that contain secrets."""
    return {name: value for name, value in os.environ.items() if name not in _named}


def read_small_file(path: str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Return a file's content and status; raise if the file is longer than ``max_bytes``."""
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
        status = os.fstat(file.fileno())
    if len(content) > max_bytes:
        raise ConfigError(f"is longer than {max_bytes} bytes")
    return content, status


def _read(path: str) -> str:
    """Read the secret in a file, without the line break at the end."""
    content, _ = read_small_file(path, _MAX_FILE_BYTES)
    # Replace invalid bytes, because a strict decoder's error would quote the content.
    text = content.decode(errors="replace").removesuffix("\n").removesuffix("\r")
    if "\ufffd" in text:
        raise ValueError("is not UTF-8 text")
    if not text:
        raise ValueError("is empty")
    return text
