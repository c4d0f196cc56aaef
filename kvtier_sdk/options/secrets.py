"""Hiding the secrets of a configuration, in messages and in logs."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from pydantic import BaseModel, SecretBytes, SecretStr

from kvtier_sdk.options.secret_sources import FILE_SUFFIX, FileSecret

#: Stands in the place of a secret.
MASK = "***"

#: A secret below this many characters is hidden only where it stands as a word: it may be part of
#: any other.
_SHORT = 4
#: Of a longer secret so many characters are recognised. Programs cut long values off.
_HEAD = 16

_SECRET_WORDS = ("credentials", "passphrase", "passwd", "password", "secret", "token")
# Up to the last '@': a password that is not percent-encoded may hold any character. In prose a
# blank or a quote ends the URL; a URL by itself is masked by position only, with '//' or without.
# A URL that was taken for a path has one slash.
_IN_PROSE = re.compile(r"((?:[a-z]:/|//)[^:\s'\"]*:)[^\s'\"]*@")
_IN_URL = re.compile(r"\A((?:(?:[^:/?#@]*:)?//)?+[^:]*:)(.*)@", re.DOTALL)
_QUERY_IN_PROSE = re.compile(r"[?&][^\s'\"]*")
_OPTION = re.compile(r"[?&]([^=&?]*)=")
# Every parser ends the user's name and password at the last '@'.
_CLEAR_URL = re.compile(r"[^:/?#@]*://[^/?#]*@[^@]*\Z")


def is_secret(name: str) -> bool:
    """Tell from an option's name that its value is a secret: ``auth_token``, ``password``.

    The path of a file with a secret is none: ``password_file``.
    """
    return not name.endswith(FILE_SUFFIX) and not set(_SECRET_WORDS).isdisjoint(_words(name))


def without_password(text: str) -> str:
    """Mask passwords and secret options of the URLs in a text.

    An option whose name is nearly a secret's is masked too: a complaint about a misspelt name
    shows the URL. The options behind a secret are masked with it: they may be the rest of a
    password with an '&' and an '=' in it. Where a URL ends is a guess here, so mask a URL by itself
    with :func:`url_without_password`.
    """
    text = _IN_PROSE.sub(rf"\1{MASK}@", text)
    return _QUERY_IN_PROSE.sub(lambda query: _without_secrets(query[0]), text)


def url_without_password(url: str) -> str:
    """Mask the password and the secret options of a URL, with any characters in them."""
    url = _IN_URL.sub(rf"\1{MASK}@", url)
    return _without_secrets(url)


def hides_more_than_password(url: str) -> bool:
    """Tell that the masked part of a URL holds more than a password to a parser: a path, a name."""
    return _IN_URL.match(url) is not None and _CLEAR_URL.match(url) is None


class Secrets:
    """The secret values of some options, and how to hide them in what is written about these.

    False if there are none.

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
        self._forms: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._values or self.files)

    @property
    def version(self) -> int:
        """A number that grows when a file is found to hold another secret."""
        return sum(len(file.values) for file in self.files)

    def mask(self, text: str) -> str:
        """Hide the secrets in a text, and the passwords of all URLs in it."""
        return without_password(self._hide(text))

    def are_in(self, text: str) -> bool:
        """Tell that one of the secrets is in a text."""
        return self._hide(text) != text

    def _hide(self, text: str) -> str:
        if self._version != (version := self.version):
            values = self._values.union(*(file.values for file in self.files))
            forms = {form for value in values if value for form in _forms(value)}
            # One secret may be the beginning of another.
            self._forms, self._version = sorted(forms, key=len, reverse=True), version
        for form in self._forms:
            if len(form) < _SHORT:
                text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", MASK, text)
            else:
                text = text.replace(form, MASK)
        for form in self._forms:
            if len(form) > _HEAD:
                text = _hide_cut(form, text)
        return text


def _forms(value: str) -> Iterator[str]:
    """A text as programs write it: as it is, in Python, in JSON, in a URL."""
    data = value.encode(errors="surrogatepass")
    yield from (value, json.dumps(value)[1:-1], quote(data), quote(data, safe=""))
    yield from (repr(value)[1:-1], ascii(value)[1:-1], repr(data)[2:-1])


def _hide_cut(form: str, text: str) -> str:
    """Hide a beginning of a secret, as far as it goes."""
    at = text.find(form[:_HEAD])
    while at >= 0:
        pairs = zip(form, text[at:], strict=False)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        text = text[:at] + MASK + text[at + length :]
        at = text.find(form[:_HEAD], at)
    return text


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
        return url_without_password(value) if "//" in value else without_password(value)
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
        yield from _secrets_in_url(value)


def options_behind_secret(url: str) -> Iterator[str]:
    """The names of the options in a URL that may be the rest of a secret before them."""
    options = list(_OPTION.finditer(url))
    first = next((at for at, option in enumerate(options) if _is_like_secret(option[1])), None)
    if first is not None:
        yield from (unquote(option[1]) for option in options[first + 1 :])


def _secrets_in_url(url: str) -> Iterator[str]:
    password = _IN_URL.match(url)
    if password is not None:
        yield from {password[2], unquote(password[2])}
    for name, value in parse_qsl(url.partition("?")[2].replace("+", "%2B")):
        if _is_like_secret(name):
            yield value


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _is_like_secret(name: str) -> bool:
    if name.endswith(FILE_SUFFIX):
        return False
    return any(difflib.get_close_matches(word, _SECRET_WORDS, 1, 0.75) for word in _words(name))


def _without_secrets(query: str) -> str:
    for option in _OPTION.finditer(query):
        if _is_like_secret(option[1]) and option.end() < len(query):
            return query[: option.end()] + MASK
    return query
