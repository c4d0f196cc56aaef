"""A tier's URL and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.secrets import url_without_password

_UNREADABLE = (
    " cannot be read: a port is a number up to 65535, and every option has a '='; elsewhere, also "
    "in a password, write '#' as %23, '%' as %25, '&' as %26, '/' as %2F, ':' as %3A, '?' as %3F "
    "and '@' as %40"
)


@dataclass(frozen=True, slots=True)
class TierURL:
    """The parts of a tier's URL: ``scheme://username:password@host:port/path?options``.

    The scheme names the backend. All other parts are percent-decoded. A path after a host begins
    with ``/``.
    """

    scheme: str
    host: str | None
    port: int | None
    username: str | None
    password: str | None = field(repr=False)
    path: str
    options: Mapping[str, str] = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Split a ``url`` such as ``file:///data/kv?capacity=1GiB`` into its parts.

        Raises:
            ConfigError: the URL is malformed, names no backend, or contains an option twice.
        """

        def fault(message: str) -> ConfigError:
            return ConfigError(f"tier URL {url_without_password(url)!r}{message}")

        try:
            parts = urlsplit(url)
            port = parts.port
            # Refuse an unescaped '#', '/', '?' or '&', because it would cut a password short.
            is_cut = parts.fragment or (port is not None and "@" in url and "@" not in parts.netloc)
            if is_cut or not all("=" in option for option in parts.query.split("&") if parts.query):
                raise ValueError
        except ValueError:
            # Hide urllib's message, because it may quote the password.
            raise fault(_UNREADABLE) from None
        scheme = url.partition(":")[0] if ":" in url else ""
        if "_" in scheme and scheme.replace("_", "").isalnum():
            raise fault(f": a URL's scheme cannot hold '_'; write '{scheme.replace('_', '-')}:'")
        if not scheme or not parts.scheme:
            raise fault(" names no backend; write for example 'file:///data/kv' or 'memory:'")
        options: dict[str, str] = {}
        # Escape '+', which keys in base64 contain, because parse_qsl would read it as a space.
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
        """Merge the query's options with the ``given`` options from other parts of the URL.

        ``None`` means an absent part. Raise a ConfigError if an option is given twice.
        """
        present = {name: value for name, value in given.items() if value is not None}
        for name in sorted(present.keys() & self.options.keys()):
            raise ConfigError(f"{self.scheme}: option {name!r} is given in the URL twice")
        return {**self.options, **present}
