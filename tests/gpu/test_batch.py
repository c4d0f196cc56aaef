"""A job of one block is copied correctly, in each direction and for each kind of memory."""

from __future__ import annotations

from support.gpu.accelerator import MIB, computing
from support.gpu.copies import Bytes, finish, open_worker, random_blocks, registered, same
from support.gpu.figures import Figure
from support.gpu.memory import pools


def test_batch(figure: Figure) -> None:
    for kind, pool in pools(16 * MIB):
        for block_bytes in (MIB, 1000):
            _there_and_back(figure, kind, pool.part(0)[:, :block_bytes])


def _there_and_back(figure: Figure, kind: str, host: Bytes) -> None:
    slots, block_bytes = host.shape
    blocks = random_blocks(8, block_bytes)
    host[:] = 0
    what = f"{kind}, {block_bytes:,} bytes"
    with open_worker(blocks, host) as worker:
        figure(f"{what}: registered", registered(worker))
        assert registered(worker) != "no", f"the driver does not register {kind} memory"
        worker.submit_store(1, [2], [5], after=computing())
        stored = finish(worker, 1)[1]
        assert stored.success, f"{what}: the store failed: {stored.error}"
        assert same(blocks, [2], host, [5]), f"{what}: stored bytes differ"
        others = [slot for slot in range(slots) if slot != 5]
        assert not host[others].any(), f"{what}: another slot was written"
        worker.submit_load(2, [6], [5], after=computing())
        loaded = finish(worker, 2)[2]
        assert loaded.success, f"{what}: the load failed: {loaded.error}"
        assert same(blocks, [2, 6], host, [5, 5]), f"{what}: loaded bytes differ"
        figure(f"{what}: store took", stored.duration_s * 1e6, "us")
        figure(f"{what}: load took", loaded.duration_s * 1e6, "us")
