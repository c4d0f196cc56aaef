"""Copies are correct where neighbouring blocks lie in two pieces of registered memory.

The worker merges neighbouring blocks into one copy, and may have to register memory in pieces. The
driver treats each piece as separate memory, so one copy must not span two pieces.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.gpu.accelerator import MIB, computing
from support.gpu.copies import (
    Bytes,
    finish,
    open_worker,
    random_blocks,
    registered,
    run_by_run,
    same,
)
from support.gpu.figures import Figure

from kvtier_sdk import HostPool
from kvtier_sdk.worker import registration

_SLOTS = 15
_PIECE_BYTES = 4 * MIB
#: A worker's part of a slot may begin inside a page.
_OFFSETS_BYTES = (0, 100)


def test_seam(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "MAX_REGISTER_BYTES", _PIECE_BYTES)
    with contextlib.closing(HostPool(_SLOTS + 1, MIB)) as pool:
        for offset_bytes in _OFFSETS_BYTES:
            _copy_all(figure, _slots(pool, offset_bytes), f"{offset_bytes} bytes into a page")


def _slots(pool: HostPool, offset_bytes: int) -> Bytes:
    return pool.part(0).reshape(-1)[offset_bytes:][: _SLOTS * MIB].reshape(_SLOTS, MIB)


def _copy_all(figure: Figure, host: Bytes, where: str) -> None:
    blocks = random_blocks(2 * _SLOTS, MIB)
    slots = np.arange(_SLOTS)
    with open_worker(blocks, host) as worker:
        figure(f"{where}: registered", registered(worker))
        for way, how in (("batch", contextlib.nullcontext()), ("run by run", run_by_run(worker))):
            with how:
                host[:] = 0
                worker.submit_store(1, slots, slots, after=computing())
                stored = finish(worker, 1)[1]
                right = same(blocks, slots, host, slots)
                figure(f"{where}, {way}: store", _words(stored.error, right))
                assert (stored.error, right) == (None, True), f"{where}, {way}: the store is wrong"
                # Reverse the slots, because otherwise a load that copies nothing could pass.
                host[:] = host[::-1].copy()
                worker.submit_load(2, slots + _SLOTS, slots, after=computing())
                loaded = finish(worker, 2)[2]
                right = same(blocks, slots + _SLOTS, host, slots)
                figure(f"{where}, {way}: load", _words(loaded.error, right))
                assert (loaded.error, right) == (None, True), f"{where}, {way}: the load is wrong"


def _words(error: str | None, right: bool) -> str:
    return error or ("bytes equal" if right else "bytes differ")
