"""One run in one call of the driver, in each direction and from each kind of memory."""

from __future__ import annotations

from gpu_checks.accelerator import MIB, computing, need_device
from gpu_checks.copies import Bytes, finish, open_worker, random_blocks, registered, same
from gpu_checks.findings import Findings
from gpu_checks.memory import pools


def check(findings: Findings) -> None:
    """Store a block, and load it into another one."""
    for kind, pool in pools(findings, 16 * MIB):
        for block_bytes in (MIB, 1000):
            _there_and_back(findings, kind, pool.part(0)[:, :block_bytes])
    need_device("copies by the driver")


def _there_and_back(findings: Findings, kind: str, host: Bytes) -> None:
    slots, block_bytes = host.shape
    blocks = random_blocks(8, block_bytes)
    host[:] = 0
    what = f"{kind}, {block_bytes:,} bytes"
    with open_worker(blocks, host) as worker:
        findings.figure(f"{what}: registered", registered(worker))
        worker.submit_store(1, [2], [5], after=computing())
        stored = finish(worker, 1)[1]
        findings.expect(stored.success, f"{what}: the store failed: {stored.error}")
        findings.expect(same(blocks, [2], host, [5]), f"{what}: stored bytes differ")
        others = [slot for slot in range(slots) if slot != 5]
        findings.expect(not host[others].any(), f"{what}: another slot was written")
        worker.submit_load(2, [6], [5], after=computing())
        loaded = finish(worker, 2)[2]
        findings.expect(loaded.success, f"{what}: the load failed: {loaded.error}")
        findings.expect(same(blocks, [2, 6], host, [5, 5]), f"{what}: loaded bytes differ")
        findings.figure(f"{what}: store took", stored.duration_s * 1e6, "us")
        findings.figure(f"{what}: load took", loaded.duration_s * 1e6, "us")
