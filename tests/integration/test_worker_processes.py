"""Two worker processes (tensor parallelism) share one pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import worker_process
from support.worker_process import BLOCKS_PER_CHUNK, CHUNK_BYTES, SLOTS, STORED

from kvtier_sdk import HostPool, PoolLayout

TESTS = Path(worker_process.__file__).parents[1]


def start(pool: HostPool, rank: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "support.worker_process", str(pool.fd), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(pool.fd,),
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )


def test_two_ranks_share_every_slot_and_get_their_own_bytes_back() -> None:
    pool = HostPool.create(PoolLayout(8, CHUNK_BYTES, workers=2))
    ranks = [start(pool, rank) for rank in range(2)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "True\n"
    # A tier sees whole slots, with the bytes of both ranks.
    for number, slot in enumerate(SLOTS):
        whole = bytes(pool.view(slot))
        blocks = STORED[number * BLOCKS_PER_CHUNK :][:BLOCKS_PER_CHUNK]
        for rank in range(2):
            expected = b"".join(
                layer[block].numpy().tobytes()
                for layer in worker_process.layers(rank)
                for block in blocks
            )
            assert whole[pool.layout.part_offset(rank) :][:CHUNK_BYTES] == expected
    for slot in set(range(8)) - set(SLOTS):
        assert not any(pool.view(slot))
    for rank in ranks:
        answer, _ = rank.communicate("load\n")
        assert answer == "True 0\n"
        assert rank.returncode == 0
    pool.close()
