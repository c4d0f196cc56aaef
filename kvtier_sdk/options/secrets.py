"""Hiding the secrets of a configuration, in messages and in logs."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Stands in the place of a secret.
MASK = "***"

_SECRET_WORDS = ("credentials", "passphrase", "passwd", "password", "secret", "token")
# Up to the last '@': a password that is not percent-encoded may hold any character. In prose a
# blank or a quote ends the URL; a URL by itself is masked by position only, with '//' or without.
_IN_PROSE = re.compile(r"(//[^:\s'\"]*:)[^\s'\"]*@")
_IN_URL = re.compile(r"\A((?:(?:[^:/?#@]*:)?//)?+[^:]*:).*@", re.DOTALL)
# A part without '=' belongs to the value before it, such as a password with an '&' in it.
_QUERY_OPTION_IN_PROSE = re.compile(
    r"([?&])([^=&?#\s]*)=([^&#\s'\"]*(?:&[^=&#\s'\"]*(?![^&#\s'\"]))*)"
)
_QUERY_OPTION_IN_URL = re.compile(r"([?&])([^=&?]*)=([^&]*(?:&[^=&]*(?![^&]))*)")
# Every parser ends the user's name and password at the last '@'.
_CLEAR_URL = re.compile(r"[^:/?#@]*://[^/?#]*@[^@]*\Z")


def is_secret(name: str) -> bool:
    """Tell from an option's name that its value is a secret: ``auth_token``, ``password``."""
    return not set(_SECRET_WORDS).isdisjoint(_words(name))


def without_password(text: str) -> str:
    """Mask passwords and secret options of the URLs in a text.

    An option whose name is nearly a secret's is masked too: a complaint about a misspelt name
    shows the URL. Where a URL ends is a guess here, so mask a URL by itself with
    :func:`url_without_password`.
    """
    text = _IN_PROSE.sub(rf"\1{MASK}@", text)
    return _QUERY_OPTION_IN_PROSE.sub(_without_secret, text)


def url_without_password(url: str) -> str:
    """Mask the password and the secret options of a URL, with any characters in them."""
    url = _IN_URL.sub(rf"\1{MASK}@", url)
    return _QUERY_OPTION_IN_URL.sub(_without_secret, url)


def hides_more_than_password(url: str) -> bool:
    """Tell that the masked part of a URL holds more than a password to a parser: a path, a name."""
    return _IN_URL.match(url) is not None and _CLEAR_URL.match(url) is None


class MaskingFormatter(logging.Formatter):
    """Masks passwords in the lines of a log, tracebacks included.

    A call whose arguments do not fit its message becomes a line too; :mod:`logging` would print
    the arguments as they are.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the record without passwords."""
        try:
            record.getMessage()
        except Exception as error:
            place = f"{record.pathname}:{record.lineno}"
            record.msg, record.args = f"cannot log {record.msg!r}: {error} ({place})", ()
        return without_password(super().format(record))


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
    """Find every text that :func:`masked` hides entirely."""
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
