import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import ANY

from kvtier_sdk import TierCapacityError, Usage

HERE = Path(__file__).parent
#: Lets the test's processes import the helpers in ``tests``.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[2] / "tests")}
KEYS = [index.to_bytes(20, "big") for index in range(40)]
WORK = {"keys": 40, "batches": 150, "capacity_chunks": 16, "chunk_bytes": 7 * 4096}


@contextmanager
def worker(root, **options):
    process = subprocess.Popen(
        [sys.executable, HERE / "sharing_worker.py", root, json.dumps({**WORK, **options})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Watch:
    """A thread that samples the used bytes of the test's file system."""

    def __init__(self, bench):
        self._bench = bench
        self._root = bench.root
        self._free_before = self._free_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_bytes = 0
        self.most_counted_bytes = 0
        self.looks = 0

    def _free_bytes(self):
        status = os.statvfs(self._root)
        return status.f_bfree * status.f_frsize

    def _run(self):
        while not self._stop.wait(0.001):
            # Read the ledger's size first, so that its growth between the reads counts as used.
            ledger_bytes = (self._root / ".shared" / "ledger").stat().st_blocks * 512
            used_bytes = self._free_before - self._free_bytes() - ledger_bytes
            self.most_bytes = max(self.most_bytes, used_bytes)
            header = self._bench.header()
            counted_bytes = header.used_bytes + header.reserved_bytes
            self.most_counted_bytes = max(self.most_counted_bytes, counted_bytes)
            self.looks += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


async def test_processes_share_one_root_and_one_is_killed(small):
    processes = 4
    small.chunk_bytes = WORK["chunk_bytes"]
    capacity = WORK["capacity_chunks"] * small.object_bytes
    tier = await small.open(capacity=capacity)
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(small))
        doomed, *others = (
            stack.enter_context(worker(small.root, seed=seed)) for seed in range(processes)
        )
        assert [next(doomed.stdout), next(doomed.stdout)] == ["ready\n", "half\n"]
        doomed.send_signal(signal.SIGKILL)
        outcomes = []
        for process in others:
            output, complaints = process.communicate(timeout=120)
            assert (process.returncode, complaints) == (0, "")
            outcomes.append(json.loads(output.splitlines()[-1]))
    assert all(outcome["stored"] > 50 and outcome["loaded"] > 10 for outcome in outcomes)
    assert watch.looks > 100
    assert capacity / 2 < watch.most_counted_bytes <= capacity
    # Directories use no space in a tmpfs. The manifest and the header use a page each, and the
    # ledger may grow by a page within a sample. A removed file keeps its space while another
    # process reads it, and a process reads one file at a time.
    being_read_bytes = (processes - 1) * small.object_bytes
    assert capacity / 2 < watch.most_bytes <= capacity + being_read_bytes + 4 * 4096
    usage = await tier.usage()
    assert usage == Usage(
        len(list(small.root.glob("*/??/*.kv"))), small.stored_bytes(), capacity, ANY
    )
    # A process that needs room removes the dead process's files and lease.
    assert await small.put(tier, *KEYS[:16]) == [None] * 16
    assert await small.put(tier, *KEYS[16:32]) == [None] * 16
    assert small.temporaries() == []
    header = small.header()
    assert (header.clean, header.reserved_bytes, len(header.reservations)) == (True, 0, 1)
    assert (header.chunks, header.used_bytes) == (16, small.stored_bytes())


async def test_reservations_of_the_dead_are_freed(bench):
    bench.chunk_bytes = WORK["chunk_bytes"]
    tier = await bench.open(capacity=3 * bench.object_bytes)
    with worker(bench.root, seed=0, capacity_chunks=3, gate="write") as writer:
        assert next(writer.stdout) == "ready\n"
        assert next(writer.stdout) == "writing\n"
        reserved_bytes = bench.header().reserved_bytes
        assert reserved_bytes > 0
        live = bench.temporaries()
        verdicts = await bench.put(tier, *KEYS[:3])
        assert {type(verdict) for verdict in verdicts} >= {TierCapacityError}
        # A temporary file still in use is kept, even if a process needs room or opens the root.
        await bench.open()
        assert bench.temporaries() == live
        assert len(live) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    assert bench.temporaries() == []
    assert bench.header().reserved_bytes == 0


FORKING = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[2])
from conftest import Workbench

store = Workbench(pathlib.Path(sys.argv[1])).make()._store
store.open()
store.count()
with store._usage.locked():
    pid = os.fork()
    if pid == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_forked_child_holds_neither_the_lock_nor_the_lease(bench):
    script = [sys.executable, "-c", FORKING, bench.root, HERE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(script, env=ENVIRONMENT, **pipes) as process:
        assert next(process.stdout) == "forked\n"
        assert process.wait() == -signal.SIGKILL
        with open(bench.root / ".shared" / "header") as header:
            fcntl.flock(header, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await bench.open()
        assert len(bench.header().reservations) == 1


def test_a_kill_at_any_call_leaves_the_count_right(tmp_path):
    script = [sys.executable, HERE / "crash_everywhere.py", tmp_path / "kv"]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 50
