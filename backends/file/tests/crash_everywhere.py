"""Kills a child process after each system call, and checks the parent's count of chunks.

Usage: crash_everywhere.py ROOT

The parent keeps the root open, because opening a root repairs it. Each child opens the root, stores
a batch that causes evictions, deletes a chunk and closes. Each child is killed one call later than
the previous child. The script prints the number of children.
"""

import fcntl
import os
import signal
import sys
from pathlib import Path

from conftest import Workbench

from kvtier_file import compiled
from kvtier_file.store import ChunkStore

CAPACITY_CHUNKS = 4
KEYS = [index.to_bytes(20, "big") for index in range(8)]
CALLS = [(os, name) for name in ("open", "rename", "unlink", "pwrite", "pwritev", "ftruncate")]
CALLS += [(fcntl, "flock")]


def open_store(bench: Workbench) -> ChunkStore:
    store = bench.make(capacity=CAPACITY_CHUNKS * bench.object_bytes)._store
    store.open()
    store.count()
    return store


def put(store: ChunkStore, bench: Workbench, *keys: bytes) -> list[object]:
    return store.store([bench.full(key) for key in keys])


def die_at(last: int) -> None:
    made = 0

    def counted(call):
        def wrapped(*args, **kwargs):
            nonlocal made
            result = call(*args, **kwargs)
            made += 1
            if made == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    # Use the Python code, because only Python's system calls can be replaced.
    compiled.batch_io = None
    for module, name in CALLS:
        setattr(module, name, counted(getattr(module, name)))


def child(bench: Workbench, last: int, turn: int) -> None:
    die_at(last)
    store = open_store(bench)
    keys = KEYS[2 + 3 * (turn % 2) :][:3]
    put(store, bench, *keys)
    store.delete([keys[1]])
    store.close()


def check(store: ChunkStore, bench: Workbench, last: int) -> None:
    usage = store.usage()
    where = f"killed at call {last}"
    files = list(bench.root.glob("*/??/*.kv"))
    assert (usage.chunks, usage.used_bytes) == (len(files), bench.stored_bytes()), where
    assert usage.used_bytes <= CAPACITY_CHUNKS * bench.object_bytes, where
    # Nothing stays reserved for the dead process, so a batch can fill the whole capacity.
    verdicts = put(store, bench, *KEYS[:CAPACITY_CHUNKS])
    assert verdicts == [None] * CAPACITY_CHUNKS, (where, verdicts)
    loaded = [bench.empty(key) for key in KEYS[:CAPACITY_CHUNKS]]
    assert store.load(loaded) == verdicts, where
    assert all(map(bench.holds, loaded)), where
    store.delete([KEYS[0]])
    put(store, bench, KEYS[7])
    put(store, bench, KEYS[6])
    assert bench.temporaries() == [], where
    header = bench.header()
    assert header.clean, where
    assert header.reserved_bytes == 0, where
    assert len(header.reservations) == 1, where


def main() -> None:
    bench = Workbench(Path(sys.argv[1]), chunk_bytes=1)
    survivor = open_store(bench)
    last = 0
    status = signal.SIGKILL
    while status == signal.SIGKILL:
        last += 1
        pid = os.fork()
        if pid == 0:
            child(bench, last, last)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        check(survivor, bench, last)
    assert status == 0, status
    print(last)


if __name__ == "__main__":
    main()
