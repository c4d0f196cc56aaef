"""What of a configuration may be shown, and of a log: all but its secrets."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

#: What stands in the place of a secret.
MASK = "***"

_SECRET_WORDS = ("credentials", "passphrase", "passwd", "password", "secret", "token")
# As far as the last '@': a password that was not percent-encoded may hold any character. In prose a
# blank or a quote ends the URL; a URL by itself is masked by position only, with '//' or without.
_IN_PROSE = re.compile(r"(//[^:\s'\"]*:)[^\s'\"]*@")
_IN_URL = re.compile(r"\A((?:(?:[^:/?#@]*:)?//)?+[^:]*:).*@", re.DOTALL)
# What has no '=' is the rest of the value before it, such as a password with an '&' in it.
_QUERY_OPTION_IN_PROSE = re.compile(
    r"([?&])([^=&?#\s]*)=([^&#\s'\"]*(?:&[^=&#\s'\"]*(?![^&#\s'\"]))*)"
)
_QUERY_OPTION_IN_URL = re.compile(r"([?&])([^=&?]*)=([^&]*(?:&[^=&]*(?![^&]))*)")
# The last '@' is the one at which every parser ends the user's name and password.
_CLEAR_URL = re.compile(r"[^:/?#@]*://[^/?#]*@[^@]*\Z")


def is_secret(name: str) -> bool:
    """Whether an option's name says that its value is a secret: ``auth_token``, ``password``."""
    return not set(_SECRET_WORDS).isdisjoint(_words(name))


def without_password(text: str) -> str:
    """Text as it may be shown: passwords and secret options of the URLs in it are ``***``.

    An option whose name is nearly that of a secret counts as one: it is where a misspelt name is
    complained about that a URL is shown.

    Whoever has the URL itself takes :func:`url_without_password`: where one ends is a guess here.
    """
    text = _IN_PROSE.sub(rf"\1{MASK}@", text)
    return _QUERY_OPTION_IN_PROSE.sub(_without_secret, text)


def url_without_password(url: str) -> str:
    """A URL as it may be shown, whatever characters its password has."""
    url = _IN_URL.sub(rf"\1{MASK}@", url)
    return _QUERY_OPTION_IN_URL.sub(_without_secret, url)


def hides_more_than_password(url: str) -> bool:
    """Whether some of what is not shown of a URL is something else to a parser: a path, a name."""
    return _IN_URL.match(url) is not None and _CLEAR_URL.match(url) is None


class MaskingFormatter(logging.Formatter):
    """Lines of a log as they may be shown, tracebacks included.

    A library's call whose arguments do not fit its message is a line too; :mod:`logging` would
    print them as they are.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record's text without passwords."""
        try:
            record.getMessage()
        except Exception as error:
            place = f"{record.pathname}:{record.lineno}"
            record.msg, record.args = f"cannot log {record.msg!r}: {error} ({place})", ()
        return without_password(super().format(record))


def masked(name: str, value: Any) -> Any:
    """A value as it may be shown, whatever is nested in it.

    Args:
        name: of the option that has it.
        value: plain data: text, numbers, lists and mappings.

    Returns:
        The same with each secret replaced by ``***``.
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
    """Every text that :func:`masked` hides entirely."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets_in(name if is_secret(name) else str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from secrets_in(name, inner)
    elif is_secret(name) and str(value):
        yield str(value)


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _without_secret(option: re.Match[str]) -> str:
    mark, name, value = option.groups()
    hidden = any(difflib.get_close_matches(word, _SECRET_WORDS, 1, 0.75) for word in _words(name))
    return f"{mark}{name}={MASK if hidden and value else value}"
