"""One rank of a tensor-parallel replica: a process with a KV cache, a worker and part of a pool.

The arguments of the program are the pool's descriptor and the rank. The program stores some blocks
and prints a line. After a line from its parent, the program loads the stored bytes into other
blocks, and prints the number of layers in which a loaded block differs from the stored block.
"""

from __future__ import annotations

import sys

import torch

from kvtier_sdk import HostPool
from kvtier_sdk.worker import KVGroup, KVTensor, OffloadWorker

BLOCKS, BLOCKS_PER_CHUNK, LAYERS, PAGE_BYTES = 32, 2, 3, 4096
CHUNK_BYTES = BLOCKS_PER_CHUNK * LAYERS * PAGE_BYTES
STORED = [5, 11, 2, 3, 8, 9]
SLOTS = [6, 1, 4]
TARGETS = [20, 22, 21, 30, 31, 16]


def layers(rank: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    shape = (BLOCKS, PAGE_BYTES)
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=source) for _ in range(LAYERS)
    ]


def main() -> None:
    fd, rank = (int(word) for word in sys.argv[1:])
    pool = HostPool.attach(fd, worker=rank)
    cache = layers(rank)
    group = KVGroup([KVTensor(layer) for layer in cache], BLOCKS_PER_CHUNK)
    with OffloadWorker([group], pool.part(rank)) as worker:
        worker.submit_store(1, STORED, SLOTS)
        worker.wait([1])
        print(worker.get_finished()[0].success, flush=True)
        sys.stdin.readline()
        worker.submit_load(2, TARGETS, SLOTS)
        worker.wait([2])
    wrong = sum(int((layer[TARGETS] != layer[STORED]).any()) for layer in cache)
    print(worker.get_finished()[0].success, wrong, flush=True)


if __name__ == "__main__":
    main()
