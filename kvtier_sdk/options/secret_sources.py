"""Secrets that a configuration names and does not hold: in a file, or in the environment."""

from __future__ import annotations

import os
import re
import stat

from pydantic import SecretStr

#: Ends the name of the option that has a file in the place of a secret.
FILE_SUFFIX = "_file"
#: A secret that is in a variable of the environment.
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

_MAX_FILE_BYTES = 1 << 16
#: The variables that this process has read secrets from.
_named: set[str] = set()


class SourcedSecret(SecretStr):
    """A secret that can be written down by its source."""

    def written(self, name: str) -> tuple[str, str]:
        """Return the option and the value that stand for the secret called ``name``."""
        raise NotImplementedError


class VariableSecret(SourcedSecret):
    """A secret of the environment, which no tier's process inherits from now on.

    Args:
        variable: its name.
        value: the secret.
    """

    def __init__(self, variable: str, value: str) -> None:
        super().__init__(value)
        self.variable = variable
        _named.add(variable)

    def written(self, name: str) -> tuple[str, str]:
        return name, f"${{{self.variable}}}"


class FileSecret(SourcedSecret):
    """A secret in a file. Its value is what the file held when it was last read.

    Attributes:
        path: of the file.
        values: all that it has held; the last is the current one.
        is_public: true if other users may read the file.

    Args:
        path: of the file.

    Raises:
        OSError, ValueError: it cannot be read, or holds no secret.
    """

    def __init__(self, path: str) -> None:
        value, self.is_public = _read(path)
        super().__init__(value)
        self.path = path
        self.values = [value]

    def written(self, name: str) -> tuple[str, str]:
        return f"{name}{FILE_SUFFIX}", self.path

    def read_again(self) -> bool:
        """Read the file; return true if it holds another secret now. Raises as the class does."""
        value, self.is_public = _read(self.path)
        if value == self._secret_value:
            return False
        # Hidden before it is used.
        self.values.append(value)
        self._secret_value = value
        return True


def environment_without_secrets() -> dict[str, str]:
    """Copy the environment for a tier's process, without the variables that hold secrets."""
    return {name: value for name, value in os.environ.items() if name not in _named}


def read_regular_file(path: str, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read a small file that should be a regular one.

    Args:
        path: of the file; a link is followed.
        max_bytes: its greatest length.

    Returns:
        Its content, and its owner and mode.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer, or of another kind; the message goes on after the file's name.
    """
    # A pipe must not hold the start of an engine.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"is longer than {max_bytes} bytes")
    return content, status


def _read(path: str) -> tuple[str, bool]:
    """Read a secret, without the line break at its end; return true with it if it is public."""
    content, status = read_regular_file(path, _MAX_FILE_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
        fault = "is not UTF-8 text"
    else:
        fault = "is empty"
        text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        # Raised out here: the context of a UnicodeDecodeError holds the content.
        raise ValueError(fault)
    return text, bool(status.st_mode & stat.S_IROTH)
