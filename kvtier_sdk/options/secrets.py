"""Masking of a configuration's secrets in messages and logs."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from pydantic import BaseModel, SecretBytes, SecretStr

from kvtier_sdk.errors import KVTierError, chain_of
from kvtier_sdk.options.secret_sources import FILE_SUFFIX, FileSecret

MASK = "***"

#: A shorter secret is masked only as a whole word, because other words may contain it.
_SHORT = 4
_WORD = r"(?<![a-z0-9])(?:credentials|passphrase|passwd|password|secret|token)(?![a-z0-9])"
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)

# A password may contain any character, so mask everything up to the last '@', and everything after
# the '=' of a secret option. In prose, a URL ends at a space or a quote. A URL that was normalized
# as if it were a path has only one slash after its scheme.
_OPTION = rf"([?&][^=&?\s]*{_WORD}[^=&?\s]*(?<!{FILE_SUFFIX})=)"
_IN_PROSE = (
    re.compile(r"((?:[a-z]:/|//)[^:\s'\"]*:)[^\s'\"]*(?=@)"),
    re.compile(rf"{_OPTION}[^\s'\"]+", re.IGNORECASE),
)
_IN_URL = (
    re.compile(r"\A((?:(?:[^:/?#@]*:)?//)?+[^:]*:)(.*)(?=@)", re.DOTALL),
    re.compile(rf"{_OPTION}.+", re.IGNORECASE | re.DOTALL),
)


def secret_among(names: Iterable[str]) -> set[str]:
    """Select the names of secrets, such as ``auth_token`` but not ``password_file``."""
    return {name for name in names if not name.endswith(FILE_SUFFIX) and _SECRET_NAME.search(name)}


def is_secret(name: str) -> bool:
    return bool(secret_among([name]))


def without_password(text: str) -> str:
    """Mask the passwords and the secret options of all URLs in a string."""
    for pattern in _IN_PROSE:
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def url_without_password(url: str) -> str:
    """Mask the password and the secret options of ``url``; both may contain any character."""
    for pattern in _IN_URL:
        url = pattern.sub(rf"\1{MASK}", url)
    return url


class Secrets:
    """The secrets to mask: the ``values``, and all secrets that are ever read from ``files``."""

    def __init__(self, values: Iterable[str] = (), files: Sequence[FileSecret] = ()) -> None:
        self.files = files
        self._values = frozenset(values)
        self._masked_from_files = -1
        self._pattern: re.Pattern[str] | None = None

    def mask(self, text: str) -> str:
        """Mask these secrets, and the passwords of all URLs."""
        from_files = sum([len(file.values) for file in self.files])
        if self._masked_from_files != from_files:
            self._pattern = _pattern_of(self._values.union(*(file.values for file in self.files)))
            self._masked_from_files = from_files
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        return without_password(text)


def _pattern_of(values: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for three forms of the secrets: plain, quoted by ``repr``, URL-encoded."""
    forms = {
        form
        for value in values
        if value
        for form in (value, repr(value)[1:-1], quote(value, safe="", errors="surrogateescape"))
    }
    # Match the longest secret first, because one can be the beginning of another.
    patterns = [
        re.escape(form) if len(form) >= _SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
        for form in sorted(forms, key=len, reverse=True)
    ]
    return re.compile("|".join(patterns)) if patterns else None


class MaskingFormatter(logging.Formatter):
    """A formatter that masks secrets and the passwords of URLs, even in tracebacks."""

    def __init__(self, fmt: str | None = None, *, secrets: Secrets | None = None) -> None:
        super().__init__(fmt)
        self._secrets = secrets or Secrets()

    def format(self, record: logging.LogRecord) -> str:
        make_loggable(record)
        return self._secrets.mask(super().format(record))


def make_loggable(record: logging.LogRecord) -> None:
    """Replace a message that cannot be formatted, because logging would print it unmasked."""
    try:
        record.getMessage()
    except Exception as error:
        place = f"{record.pathname}:{record.lineno}"
        record.msg, record.args = f"cannot log {record.msg!r}: {error} ({place})", ()


def masked(name: str, value: Any) -> Any:
    """Return the ``value`` of option ``name``, with ``***`` in place of each secret."""
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


def masked_error(error: BaseException, secrets: Secrets) -> BaseException:
    """Return ``error``, or a masked copy if the text of the error or of a cause shows a secret."""
    shown = "".join(
        line for one in chain_of(error) for line in traceback.format_exception_only(one)
    )
    if secrets.mask(shown) == shown:
        return error
    # Use the nearest base in errors.py, which callers catch, or a new class with the error's name.
    ours: list[Any] = [c for c in type(error).__mro__ if c.__module__ == KVTierError.__module__]
    theirs = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
    kind = [*ours, theirs][0]
    masked = kind.__new__(kind, secrets.mask(text_of_all(error)))
    for name, value in vars(error).items():
        if isinstance(value, str | int | None):
            setattr(masked, name, secrets.mask(value) if isinstance(value, str) else value)
    if (cause := error.__cause__ or error.__context__) is not None:
        masked.__cause__ = masked_error(cause, secrets)
    # A client may keep the original error, whose traceback would keep the buffers alive.
    masked.__traceback__, error.__traceback__ = error.__traceback__, None
    return masked  # type: ignore[no-any-return]


def text_of_all(error: BaseException) -> str:
    """Return an error's text, and for a group also its members' texts."""
    if not isinstance(error, BaseExceptionGroup):
        return str(error)
    members = (f"{type(one).__name__}: {text_of_all(one)}" for one in error.exceptions)
    return f"{error}: {'; '.join(members)}"
