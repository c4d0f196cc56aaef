"""Real processes on one root: storing, loading, evicting, and killed in the midst of it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtier_file.control import ControlFile
from kvtier_sdk import TierCapacityError, Usage

HERE = Path(__file__).parent
#: For processes that use what the tests use.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[2] / "tests")}
KEYS = [index.to_bytes(20, "big") for index in range(40)]
WORK = {"keys": 40, "batches": 300, "capacity_chunks": 16, "chunk_bytes": 7 * 4096}


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


def read_control(root):
    fd = os.open(root / ".shared" / "control", os.O_RDWR)
    try:
        control_file = ControlFile(fd)
        with control_file.locked():
            return control_file.read()
    finally:
        os.close(fd)


class Watch:
    """Measures a file system that nothing else uses: one number, which no scan can miss."""

    def __init__(self, root):
        self._root = root
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
        while not self._stop.is_set():
            # The ledger grows; measured first, it is not more than what it takes below.
            ledger_bytes = (self._root / ".shared" / "ledger").stat().st_blocks * 512
            used_bytes = self._free_before - self._free_bytes() - ledger_bytes
            self.most_bytes = max(self.most_bytes, used_bytes)
            control = read_control(self._root)
            counted_bytes = control.used_bytes + control.reserved_bytes
            self.most_counted_bytes = max(self.most_counted_bytes, counted_bytes)
            self.looks += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("processes", [2, 4])
async def test_processes_share_one_root_and_one_is_killed(small, processes):
    small.chunk_bytes = WORK["chunk_bytes"]
    capacity = WORK["capacity_chunks"] * small.object_bytes
    tier = await small.open(capacity=capacity)
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(small.root))
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
    # Directories take nothing here; a page each for the manifest and the control file, and one
    # that the ledger may have grown by while we looked.
    assert capacity / 2 < watch.most_bytes <= capacity + 4 * 4096
    usage = await tier.usage()
    assert usage == Usage(len(list(small.root.glob("*/??/*.kv"))), small.stored_bytes(), capacity)
    # To be short of room is reason enough to sweep and to end the dead one's lease.
    assert await small.put(tier, *KEYS[:16]) == [None] * 16
    assert await small.put(tier, *KEYS[16:32]) == [None] * 16
    assert small.temporaries() == []
    control = read_control(small.root)
    assert (control.settled, control.reserved_bytes, len(control.promises)) == (True, 0, 1)
    assert (control.chunks, control.used_bytes) == (16, small.stored_bytes())


async def test_case_15_processes_store_the_same_keys_at_once(bench):
    """Name temporaries after the key alone: one of the renames fails."""
    bench.chunk_bytes = WORK["chunk_bytes"]
    tier = await bench.open()
    with ExitStack() as stack:
        # One seed: both do the same in the same order.
        options = {"seed": 1, "capacity_chunks": 100}
        both = [stack.enter_context(worker(bench.root, **options)) for _ in range(2)]
        for process in both:
            output, complaints = process.communicate(timeout=120)
            assert (process.returncode, complaints) == (0, "")
            assert "refused" not in json.loads(output.splitlines()[-1])
    assert await tier.usage() == Usage(40, 40 * bench.object_bytes, None)
    assert bench.stored_bytes() == 40 * bench.object_bytes
    assert await bench.loads(tier, *KEYS)


async def test_what_was_reserved_by_the_dead_is_free_again(bench):
    bench.chunk_bytes = WORK["chunk_bytes"]
    tier = await bench.open(capacity=3 * bench.object_bytes)
    with worker(bench.root, seed=0, capacity_chunks=3, gate="write") as writer:
        assert next(writer.stdout) == "ready\n"
        assert next(writer.stdout) == "writing\n"
        reserved_bytes = read_control(bench.root).reserved_bytes
        assert reserved_bytes > 0
        live = bench.temporaries()
        verdicts = await bench.put(tier, *KEYS[:3])
        assert {type(verdict) for verdict in verdicts} >= {TierCapacityError}
        # Neither being short of room nor an open sweeps what is still being written.
        await bench.open()
        assert bench.temporaries() == live
        assert len(live) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    assert bench.temporaries() == []
    assert read_control(bench.root).reserved_bytes == 0


async def test_the_next_open_sweeps_what_the_killed_left(bench):
    bench.chunk_bytes = WORK["chunk_bytes"]
    with worker(bench.root, seed=0, gate="write") as writer:
        assert next(writer.stdout) == "ready\n"
        assert next(writer.stdout) == "writing\n"
    assert len(bench.temporaries()) == 1
    tier = await bench.open()
    assert bench.temporaries() == []
    assert await tier.usage() == Usage(0, 0, None)
    control = read_control(bench.root)
    assert (control.reserved_bytes, len(control.promises)) == (0, 1)


FORKING = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[2])
from conftest import Workbench

store = Workbench(pathlib.Path(sys.argv[1])).make()._store
store.open()
with store._account.section():
    pid = os.fork()
    if pid == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_forked_child_holds_neither_the_lock_nor_the_lease(bench):
    """Drop ``register_at_fork``: whoever comes next waits for a lock that the child holds."""
    script = [sys.executable, "-c", FORKING, bench.root, HERE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(script, env=ENVIRONMENT, **pipes) as process:
        assert next(process.stdout) == "forked\n"
        assert process.wait() == -signal.SIGKILL
        with open(bench.root / ".shared" / "control") as control:
            fcntl.flock(control, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await bench.open()
        assert len(read_control(bench.root).promises) == 1


def test_killed_at_any_call_and_the_others_count_right(tmp_path):
    """Drop ``changing`` in ``ChunkStore._make_room``: chunks are counted that are gone."""
    script = [sys.executable, HERE / "crash_everywhere.py", tmp_path / "kv"]
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 50
