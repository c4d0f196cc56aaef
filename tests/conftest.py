from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine import A, B, Engine

# A shell starts background jobs with SIGINT ignored, but some tests need the signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(*args, **kwargs))
        engines[-1].manager.on_new_request(A)
        engines[-1].manager.on_new_request(B)
        return engines[-1]

    yield build
    for engine in engines:
        for tier in engine.tiers:
            if tier.gate is not None:
                tier.gate.set()
        engine.manager.shutdown(1.0)
        engine.pool.close()


@pytest.fixture
def shm_directory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"test-{uuid.uuid4().hex}"
    path.mkdir(mode=0o700)
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()
