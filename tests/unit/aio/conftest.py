"""Both event loops, and an end for tests of calls that would wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test runs on both loops: they report and tear down in ways of their own."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    """Cancel a test that hangs."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(30.0, lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    yield
    timer.cancel()
