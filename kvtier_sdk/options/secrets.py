"""Hiding the secrets of a configuration, in messages and in logs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from pydantic import BaseModel, SecretBytes, SecretStr

from kvtier_sdk.options.secret_sources import FILE_SUFFIX, FileSecret

#: Stands in the place of a secret.
MASK = "***"

#: A secret below this many characters is hidden only where it stands as a word: it may be part of
#: any other.
_SHORT = 4
_WORD = r"(?<![a-z0-9])(?:credentials|passphrase|passwd|password|secret|token)(?![a-z0-9])"
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)


# A password may hold any character, so it ends at the last '@', and the options behind a secret may
# be the rest of it. In prose a blank or a quote ends a URL; a URL by itself is masked by position
# only, with '//' or without. A URL that was taken for a path has one slash.
_OPTION = rf"([?&][^=&?\s]*{_WORD}[^=&?\s]*(?<!{FILE_SUFFIX})=)"
_IN_PROSE = (
    re.compile(r"((?:[a-z]:/|//)[^:\s'\"]*:)[^\s'\"]*(?=@)"),
    re.compile(rf"{_OPTION}[^\s'\"]+", re.IGNORECASE),
)
_IN_URL = (
    re.compile(r"\A((?:(?:[^:/?#@]*:)?//)?+[^:]*:)(.*)(?=@)", re.DOTALL),
    re.compile(rf"{_OPTION}.+", re.IGNORECASE | re.DOTALL),
)


def is_secret(name: str) -> bool:
    """Tell from an option's name that its value is a secret: ``auth_token``, ``password``.

    The path of a file with a secret is none: ``password_file``.
    """
    return not name.endswith(FILE_SUFFIX) and _SECRET_NAME.search(name) is not None


def without_password(text: str) -> str:
    """Mask passwords and secret options of the URLs in a text.

    The options behind a secret are masked with it. Where a URL ends is a guess here, so mask a URL
    by itself with :func:`url_without_password`.
    """
    for pattern in _IN_PROSE:
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def url_without_password(url: str) -> str:
    """Mask the password and the secret options of ``url``, with any characters in them."""
    for pattern in _IN_URL:
        url = pattern.sub(rf"\1{MASK}", url)
    return url


class Secrets:
    """The secret values of some options, and how to hide them in what is written about these.

    Args:
        values: in the clear.
        files: secrets whose former and future values are hidden too.

    Attributes:
        files: the same.
    """

    def __init__(self, values: Iterable[str] = (), files: Sequence[FileSecret] = ()) -> None:
        self.files = files
        self._values = frozenset(values)
        self._version = -1
        self._pattern: re.Pattern[str] | None = None

    @property
    def version(self) -> int:
        """A number that grows when a file is found to hold another secret."""
        return sum([len(file.values) for file in self.files])

    def mask(self, text: str) -> str:
        """Hide the secrets in a text, and the passwords of all URLs in it."""
        if self._version != (version := self.version):
            values = self._values.union(*(file.values for file in self.files))
            forms = {form for value in values if value for form in _forms(value)}
            # One secret may be the beginning of another.
            patterns = map(_pattern_of, sorted(forms, key=len, reverse=True))
            self._pattern = re.compile("|".join(patterns)) if forms else None
            self._version = version
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        return without_password(text)


def _forms(value: str) -> tuple[str, str, str]:
    """A secret as it is, as Python quotes it, and as a URL holds it."""
    return value, repr(value)[1:-1], quote(value, safe="", errors="surrogateescape")


def _pattern_of(form: str) -> str:
    pattern = re.escape(form)
    return pattern if len(form) >= _SHORT else rf"(?<!\w){pattern}(?!\w)"


class MaskingFormatter(logging.Formatter):
    """Masks secrets in the lines of a log, tracebacks included.

    Args:
        secrets: to hide beside the passwords of URLs.
    """

    def __init__(self, fmt: str | None = None, *, secrets: Secrets | None = None) -> None:
        super().__init__(fmt)
        self._secrets = secrets or Secrets()

    def format(self, record: logging.LogRecord) -> str:
        """Format the record without secrets."""
        make_loggable(record)
        return self._secrets.mask(super().format(record))


def make_loggable(record: logging.LogRecord) -> None:
    """Turn a call whose arguments do not fit its message into a line that says so.

    :mod:`logging` would print the arguments as they are.
    """
    try:
        record.getMessage()
    except Exception as error:
        place = f"{record.pathname}:{record.lineno}"
        record.msg, record.args = f"cannot log {record.msg!r}: {error} ({place})", ()


def masked(name: str, value: Any) -> Any:
    """Replace each secret in an option's value, however deep, by ``***``.

    Args:
        name: the option's name.
        value: plain data: text, numbers, lists and mappings.
    """
    if is_secret(name):
        return MASK
    if isinstance(value, str):
        return url_without_password(value)
    if isinstance(value, Mapping):
        return {key: masked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked(name, inner) for inner in value)
    return value


def secrets_in(name: str, value: Any) -> Iterator[str]:
    """Find every text that :func:`masked` hides, also inside of URLs, and every declared secret."""
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, SecretBytes):
        yield value.get_secret_value().decode(errors="surrogateescape")
    elif isinstance(value, Mapping | BaseModel):
        for key, inner in dict(value).items():
            yield from secrets_in(name if is_secret(name) else str(key), inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from secrets_in(name, inner)
    elif is_secret(name) and value is not None and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, str):
        if (password := _IN_URL[0].match(value)) is not None:
            yield from (password[2], unquote(password[2]))
        query = value.partition("?")[2].replace("+", "%2B")
        yield from (of for option, of in parse_qsl(query) if is_secret(option))
