"""Detects copies of payloads by counting moved and allocated bytes."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from kvtier_sdk import SecondaryTierManager, Transfer
from support.workbench import Workbench


def _address_of(view: bytes | memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0


class ByteLedger:
    """Counts the bytes that calls like ``os.readv`` move, inside and outside transfers' buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *calls: str) -> None:
        self._spans: list[tuple[int, int]] = []
        self.direct_bytes = 0
        self.other_bytes = 0
        for name in calls:
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def begin(self, transfers: Iterable[Transfer]) -> None:
        self._spans = [
            (_address_of(view), _address_of(view) + len(view))
            for transfer in transfers
            for view in transfer.buffers
        ]
        self.direct_bytes = self.other_bytes = 0

    def _counting(self, call: Callable[..., int]) -> Callable[..., int]:
        def counting(fd: int, views: Sequence[bytes | memoryview], *rest: int) -> int:
            moved_bytes = left_bytes = call(fd, views, *rest)
            for view in views:
                part_bytes = min(left_bytes, len(view))
                left_bytes -= part_bytes
                at = _address_of(view)
                if any(start <= at < end for start, end in self._spans):
                    self.direct_bytes += part_bytes
                else:
                    self.other_bytes += part_bytes
            return moved_bytes

        return counting


class Peak:
    """The peak growth of memory inside ``with traced_peak()``, set when the ``with`` ends."""

    allocated_bytes = 0


@contextmanager
def traced_peak() -> Iterator[Peak]:
    peak = Peak()
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield peak
        peak.allocated_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    finally:
        tracemalloc.stop()


async def check_no_copies(
    bench: Workbench,
    tier: SecondaryTierManager,
    ledger: ByteLedger,
    operation: str,
    *,
    heads_bytes: int = 0,
) -> None:
    """Fail if a tier copies more payload than the ``heads_bytes`` received with headers."""
    stored, fresh = ([bytes([base, n]) * 10 for n in range(8)] for base in range(2))
    assert await bench.put(tier, *stored) == [None] * 8
    batch = list(map(bench.empty, stored) if operation == "load" else map(bench.full, fresh))
    ledger.begin(batch)
    with traced_peak() as peak:
        assert await getattr(tier, operation)(batch) == [None] * 8
    assert all(map(bench.holds, batch))
    assert 0 <= 8 * bench.object_bytes - ledger.direct_bytes <= heads_bytes
    assert ledger.other_bytes < max(heads_bytes, 8 * 200)
    assert peak.allocated_bytes < 256 * 1024
