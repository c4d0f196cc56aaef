"""A tier's URL, taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.secrets import masked, url_without_password


@dataclass(frozen=True, slots=True)
class TierURL:
    """A tier's URL, taken apart: ``scheme://username:password@host:port/path?options``.

    Attributes:
        scheme: names the backend.
        host: the host, or ``None``.
        port: the port, or ``None``.
        username: the user's name, percent-decoded, or ``None``.
        password: the password, percent-decoded, or ``None``.
        path: the path, percent-decoded; begins with ``/`` if there is a host.
        options: the query; every value is text.
    """

    scheme: str
    host: str | None
    port: int | None
    username: str | None
    password: str | None
    path: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        shown = (
            f"{part.name}={masked(part.name, getattr(self, part.name))!r}" for part in fields(self)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Split a URL into its parts.

        Args:
            url: for example ``file:///data/kv?capacity=1GiB``.

        Returns:
            Its parts.

        Raises:
            ConfigError: there is no scheme, the port is not a number, there is a fragment, or
                an option has no '=' or is given twice.
        """

        def fault(message: str) -> ConfigError:
            return ConfigError(f"tier URL {url_without_password(url)!r}{message}")

        # urllib's own messages quote parts of the URL, perhaps the password.
        try:
            parts = urlsplit(url)
        except ValueError:
            raise fault(": the host cannot be read") from None
        # Checked first, because a fragment cuts off the rest of the host, the port or the query.
        if parts.fragment:
            raise fault(": write '#' as %23, also in a password")
        try:
            port = parts.port
            # The digits before a '/' or '?' in a password look like a port.
            if port is not None and "@" in url and "@" not in parts.netloc:
                raise ValueError
        except ValueError:
            raise fault(
                ": the port should be a number up to 65535; in a password "
                "write ':' as %3A, '/' as %2F, '?' as %3F, '@' as %40, '%' as %25"
            ) from None
        scheme = url.partition(":")[0] if ":" in url else ""
        if "_" in scheme and scheme.replace("_", "").isalnum():
            raise fault(f": a URL's scheme cannot hold '_'; write '{scheme.replace('_', '-')}:'")
        if not scheme or not parts.scheme:
            raise fault(" names no backend; write for example 'file:///data/kv' or 'memory:'")
        # The message does not name the option, which may be the rest of a password.
        if parts.query and not all("=" in option for option in parts.query.split("&")):
            raise fault(": an option has no '='; write '&' as %26, also in a password")
        options: dict[str, str] = {}
        # parse_qsl reads '+' as a blank, as in a browser's form; base64 keys contain it.
        for name, value in parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True):
            if name in options:
                raise fault(f": option {name!r} is given twice")
            options[name] = value
        return cls(
            scheme=scheme,
            host=parts.hostname,
            port=port,
            username=unquote(parts.username) if parts.username is not None else None,
            password=unquote(parts.password) if parts.password is not None else None,
            path=unquote(parts.path),
            options=options,
        )

    def options_beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add options from other parts of the URL to those of the query.

        Args:
            given: option name to value; ``None`` stands for a part that is absent.

        Returns:
            Options, not yet validated.

        Raises:
            ConfigError: an option is in both.
        """
        present = {name: value for name, value in given.items() if value is not None}
        for name in sorted(present.keys() & self.options.keys()):
            raise ConfigError(f"{self.scheme}: option {name!r} is given in the URL twice")
        return {**self.options, **present}
