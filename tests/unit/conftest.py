from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import pytest

from kvtier_sdk import Clock, Namespace, OffloadKey, SystemClock, TierContext

CHUNK_BYTES = 256
HEADER_BYTES = 64


@pytest.fixture
def removed() -> list[OffloadKey]:
    return []


@pytest.fixture
def make_context(removed: list[OffloadKey]) -> Callable[..., TierContext]:
    def report_removed(keys: Iterable[OffloadKey], **why: bool) -> None:
        removed.extend(keys)

    def make(clock: Clock | None = None) -> TierContext:
        return TierContext(
            name="under-test",
            namespace=Namespace({"model": "m"}),
            chunk_bytes=CHUNK_BYTES,
            header_bytes=HEADER_BYTES,
            payload_bytes=CHUNK_BYTES,
            clock=clock or SystemClock(),
            logger=logging.getLogger("kvtier.test"),
            report_removed=report_removed,
        )

    return make
