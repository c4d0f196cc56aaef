"""Parts of error messages: an option's place, the closest known word, a shortened value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_sdk.errors import ConfigError

#: An error message shows at most this many characters of a value.
_BRIEF = 200


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a configuration. An error message begins with its string form.

    ``where`` names the source, such as ``kv.toml``. ``path`` is the place in the source, such as
    ``tiers[1]``; an empty path means the whole source.
    """

    where: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.where}: option {self.path!r}" if self.path else f"{self.where}:"

    def at(self, *parts: str | int) -> Place:
        """Return a place below this one. Each of ``parts`` is a name or an index."""
        path = self.path
        for part in parts:
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        return Place(self.where, path)

    def table(self, value: object) -> dict[str, Any]:
        """Return a copy of the table ``value``; raise :class:`ConfigError` if it is not a table."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self} should be a table of options")
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"{self.at(brief(str(name)))} has a name that is not text")
        return dict(value)

    def entries(self, value: object) -> dict[Place, object]:
        """Return the entries of the list ``value`` by place; raise an error if it is not a list."""
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{self} should be a list")
        return {self.at(index): entry for index, entry in enumerate(value)}


def brief(text: str) -> str:
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}..."


def one_line(text: str) -> str:
    """Escape unprintable characters, so that text from a store cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, known: Iterable[str], label: str) -> str:
    """Return advice on an unknown word: ``did you mean 'root'? allowed: capacity, root``.

    ``label`` introduces the list of ``known`` words, for example "allowed" or "installed".
    """
    names = sorted(known)
    listing = f"{label}: {', '.join(names) or 'none'}"
    close = closest(word, names)
    return f"did you mean {close!r}? {listing}" if close else listing


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word, or ``None`` if none is similar."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1)), None)
