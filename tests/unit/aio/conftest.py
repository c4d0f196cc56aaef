"""Both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test runs on both loops: they report and tear down in ways of their own."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
