"""Options of the file tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kvtier_sdk import BoundedTierConfig, BytesOrShare, ConfigError, Flag, TierURL

DirectIO = Literal["auto", "on", "off"]

_DIRECT_IO: dict[str, DirectIO] = {
    "auto": "auto",
    **dict.fromkeys(("on", "true", "yes", "1"), "on"),
    **dict.fromkeys(("off", "false", "no", "0"), "off"),
}


def _absolute(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"{value!r} is not a path; write for example '/data/kv'")
    return Path(os.path.abspath(value))


def _direct_io(value: object) -> DirectIO:
    choice = _DIRECT_IO.get(str(value).lower())
    if choice is None:
        raise ValueError(f"{value!r} is not one of auto, on, off")
    return choice


class FileTierConfig(BoundedTierConfig):
    """Options of the file tier.

    Attributes:
        root: the directory, made if it is missing; a relative path starts from the current
            directory.
        min_free: free space to keep on the file system, in bytes or as a share of its size:
            ``10GiB``, ``5%``; 0 for none.
        direct_io: ``"on"`` bypasses the page cache (``O_DIRECT``) or fails at open, ``"off"`` uses
            the page cache, ``"auto"`` bypasses the page cache where that works.
        permissions: ``"strict"`` refuses a root that another user owns or may write to, ``"warn"``
            uses the root and logs a warning.
        fsync: true to make stored chunks survive a power failure; if false, they survive a crash
            of the process, but not always a crash of the machine.
    """

    root: Annotated[Path, BeforeValidator(_absolute)]
    min_free: BytesOrShare = 0.05
    direct_io: Annotated[DirectIO, BeforeValidator(_direct_io)] = "auto"
    fsync: Flag = False
    permissions: Literal["strict", "warn"] = "strict"

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Read the options in a URL such as ``file:///data/kv?capacity=1GiB``."""
        if url.host is not None or url.port is not None or url.username is not None:
            path = f"{url.host or ''}{url.path}"
            raise ConfigError(
                f"{url.scheme}: takes no host; write three slashes: '{url.scheme}:///{path}'"
            )
        return url.options_beside({"root": url.path or None})

    def location(self) -> str:
        """Return the root as a URL, with its symbolic links resolved."""
        return f"file://{os.path.realpath(self.root)}"
