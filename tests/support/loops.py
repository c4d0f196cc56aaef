from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import uvloop

_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    one = os.environ.get("KVTIER_TEST_LOOP")
    return {one: _LOOPS[one]} if one else dict(_LOOPS)
