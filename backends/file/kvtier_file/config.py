"""Options of the file tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kvtier_sdk import Bytes, BytesOrShare, ConfigError, Flag, TierConfig, TierURL

DirectIO = Literal["auto", "on", "off"]

_DIRECT_IO: dict[str, DirectIO] = {
    "auto": "auto",
    **dict.fromkeys(("on", "true", "yes", "1"), "on"),
    **dict.fromkeys(("off", "false", "no", "0"), "off"),
}


def _absolute(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"{value!r} is no path; write for example '/data/kv'")
    return Path(os.path.abspath(value))


def _direct_io(value: object) -> DirectIO:
    choice = _DIRECT_IO.get(str(value).lower())
    if choice is None:
        raise ValueError(f"{value!r} is none of auto, on, off")
    return choice


class FileTierConfig(TierConfig):
    """Options of the file tier.

    Attributes:
        root: the directory, made where it is missing; a relative path counts from the current
            directory.
        capacity_bytes: what all namespaces under the root may take, whichever processes use
            them, before the least recently used chunks go; unlimited where absent.
        min_free: free space of the file system to leave alone, in bytes or as a share of its
            size: ``10GiB``, ``5%``; 0 leaves none.
        direct_io: ``"on"`` goes past the page cache (``O_DIRECT``) or fails at open, ``"off"``
            goes through it, ``"auto"`` goes past it where that works.
        fsync: whether a stored chunk survives a power failure; without it, only the end of the
            process.
    """

    root: Annotated[Path, BeforeValidator(_absolute)]
    capacity_bytes: Bytes | None = Field(None, alias="capacity")
    min_free: BytesOrShare = 0.05
    direct_io: Annotated[DirectIO, BeforeValidator(_direct_io)] = "auto"
    fsync: Flag = False

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Read ``file:///data/kv?capacity=1GiB``: the path is the root, the query the rest.

        Args:
            url: the parts.

        Returns:
            Options, not yet validated.

        Raises:
            ConfigError: there is a host, or the root is given twice.
        """
        if url.host is not None or url.port is not None or url.username is not None:
            path = f"{url.host or ''}{url.path}"
            raise ConfigError(
                f"{url.scheme}: takes no host; write three slashes: '{url.scheme}:///{path}'"
            )
        options = dict(url.options)
        if url.path:
            if "root" in options:
                raise ConfigError(f"{url.scheme}: option 'root' is given beside the URL's path")
            options["root"] = url.path
        return options

    def location(self) -> str:
        """The root, without symlinks."""
        return f"file://{os.path.realpath(self.root)}"
