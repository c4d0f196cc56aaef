from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.loops import loop_factories

pytest_asyncio_loop_factories = loop_factories


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    timer = loop.call_later(30.0, lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    yield
    timer.cancel()
