"""A file tier at its capacity, and on a disk that becomes full during a replay.

Some tests fill a small file system, and are skipped where the process cannot mount one. Others
replace ``pwritev`` and ``pwrite`` by functions that raise ``ENOSPC``.
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.live import CHUNK_BYTES, Live, live
from typer.testing import CliRunner

from kvtier_sdk import TieringConfig, make_offload_key
from kvtier_sdk.cli.app import app
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, replay

MIB = 2**20
FULL = "No space left on device"
_STEPS = 3000
_LOOK_S = 0.002


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    at = tmp_path / "mounted"

    def mounted(size_bytes: int, most_inodes: int = 0) -> Path:
        at.mkdir()
        options = f"size={size_bytes},nr_inodes={most_inodes},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            at.rmdir()
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        return at

    yield mounted
    if at.exists():
        subprocess.run(["umount", "-l", str(at)], check=True)


@contextmanager
def watched(root: Path) -> Iterator[list[int]]:
    """Yield a list with one item: the peak growth of the file system's usage, in bytes."""
    free_bytes = _free_bytes(root)
    most = [0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_LOOK_S):
            most[0] = max(most[0], free_bytes - _free_bytes(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join()


def _free_bytes(root: Path) -> int:
    status = os.statvfs(root)
    return status.f_bfree * status.f_frsize


def test_a_capacity_is_kept_while_sixteen_times_as_much_is_written(
    mount: Callable[[int], Path],
) -> None:
    """If ``ChunkStore._reserve`` reserved no room, writes would exceed the capacity."""
    root = mount(64 * MIB)
    chunk_bytes, chunks = MIB // 16, 64
    workload = [
        ReplayRequest(str(n), tuple(b"%018d%018d" % (n, m) for m in range(chunks)))
        for n in range(64)
    ]
    tier = f"file://{root}/kv?capacity=16MiB&min_free=0&admission=off"
    with watched(root) as most:
        report = replay(
            workload,
            TieringConfig.from_dict(
                {"slots": 2 * chunks, "chunk_bytes": chunk_bytes, "tiers": [tier]}
            ),
        )
    assert (report.wrong_bytes, report.failures, report.dropped) == (0, {}, 0)
    assert report.tiers[1].stored_bytes == 256 * MIB
    assert report.tiers[1].evicted_chunks > 4096 - 257
    # Writes in flight reserve their bytes, so they stay within the capacity. The tier's ledger adds
    # up to 1 MiB before it is compacted, and directories add a few pages.
    assert 15 * MIB < most[0] < 16 * MIB + MIB + 2**16


class FullDisk:
    """A disk whose writes fail in this process while ``is_full`` is set."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.url = f"file://{root}/kv?min_free=0&runner=thread"
        self.is_full = False
        for name in ("pwritev", "pwrite"):
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, write: Callable[..., int]) -> Callable[..., int]:
        def wrapped(*args: object) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        return wrapped


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(tmp_path, monkeypatch)


def test_a_replay_goes_on_when_the_disk_runs_full(disk: FullDisk) -> None:
    """If ``TierCapacityError`` did not open the breaker, every store would be tried."""
    workload = chat_workload(300, 0)

    def progressed(done: int) -> None:
        if done == 60:
            disk.is_full = True

    config = TieringConfig.from_dict({"slots": 60, "chunk_bytes": 8192, "tiers": [disk.url]})
    report = replay(workload, config, on_progress=progressed)
    file = report.tiers[1]
    assert report.requests == 300
    assert report.wrong_bytes == 0
    assert file.failures["store.capacity"] > 0
    assert set(file.failures) == {"store.capacity"}
    assert FULL in " ".join(file.errors)
    # The open breaker refuses the later stores, so these are not tried.
    assert file.stores_open == 1
    assert file.dropped["store.unavailable"] > file.failures["store.capacity"]
    assert file.reads_open == 0
    assert file.hit_chunks > 0


@pytest.mark.parametrize("lacks", ["bytes", "inodes"])
def test_a_disk_that_others_fill_keeps_what_was_stored_last(
    mount: Callable[..., Path], lacks: str, runner: str
) -> None:
    """A disk can run out of inodes while its byte counters still show free space."""
    root = mount(4 * MIB, 400 if lacks == "inodes" else 0)
    keys = [b"%036d" % n for n in range(320)]
    with live([f"file://{root}/kv?min_free=0&runner={runner}"], slots=32) as engine:
        stats = engine.manager.stats[1]
        before = engine.begin("before")
        for start in range(0, len(keys), 10):
            engine.store(before, *keys[start : start + 10])
            if lacks == "bytes" and start == 100:
                with suppress(OSError), (root / "filler").open("wb", buffering=0) as filler:
                    while True:
                        filler.write(bytes(4096))
        after = engine.begin("after")
        assert engine.settle(after, *keys[-40:-35]) == ["HIT"] * 5
        engine.load(after, *keys[-40:-35])
        assert stats.stored_chunks == len(keys)
        assert stats.evicted_chunks > 0
        assert not stats.failures
        assert stats.stores_open == 0


def test_a_full_disk_stops_stores_and_not_loads_until_there_is_room(disk: FullDisk) -> None:
    """If a full disk opened the breaker of loads too, the lookups below would miss."""
    keys = [b"%036d" % n for n in range(128)]
    with live([disk.url], slots=16, policy="lru") as engine:
        stats = engine.manager.stats[1]
        before = engine.begin("before")
        for key in keys[:32]:
            engine.store(before, key)
        assert stats.stored_chunks == 32
        disk.is_full = True
        for key in keys[32:]:
            engine.store(before, key)
        assert stats.stores_open == 1
        # The 96 later stores evicted these chunks from the pool, so only the disk has them.
        after = engine.begin("after")
        for key in keys[:32]:
            assert engine.settle(after, key) == ["HIT"]
            engine.load(after, key)
        assert (stats.stores_open, stats.reads_open) == (1, 0)
        assert stats.loaded_bytes == 32 * CHUNK_BYTES
        disk.is_full = False
        for _ in range(_STEPS):
            if not stats.stores_open:
                break
            engine.step()
        engine.store(after, b"%036d" % 999)
        assert stats.stored_chunks == 33


class Scanned:
    """An engine whose tier holds about 64 chunks and has begun to admit only chunks seen before."""

    def __init__(self, engine: Live) -> None:
        self.engine = engine
        self.stats = engine.manager.stats[1]
        self._request = engine.begin("scan")
        numbers = itertools.count()
        self._new = (make_offload_key(b"%032d" % number) for number in numbers)
        often = [next(self._new) for _ in range(32)]
        for _ in range(60):
            for start in range(0, 32, 8):
                engine.store(self._request, *often[start : start + 8])
            self.store_new(64)
            if self.stats.is_selective:
                break
        self.until(lambda: bool(self.stats.used_bytes))
        assert self.refused(8) == 8

    def refused(self, count: int) -> int:
        """Store ``count`` new chunks, and return how many of them the tier did not admit."""
        refused, stored = self.stats.not_admitted_chunks, self.stats.stored_chunks
        self.store_new(count)
        refused = self.stats.not_admitted_chunks - refused
        assert self.stats.stored_chunks == stored + count - refused
        return refused

    def store_new(self, count: int) -> None:
        for _ in range(0, count, 8):
            self.engine.store(self._request, *(next(self._new) for _ in range(8)))

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.engine.step()


def remove_by_command(root: Path) -> None:
    done = CliRunner().invoke(app, ["tier", "rm", f"file://{root}", "--model", "m", "--yes"])
    assert done.exit_code == 0, done.output


def remove_files(root: Path) -> None:
    for file in root.rglob("*.kv"):
        file.unlink()


@pytest.mark.parametrize("remove", [remove_by_command, remove_files])
def test_nothing_is_refused_while_a_full_root_has_room_again(
    tmp_path: Path, runner: str, remove: Callable[[Path], None]
) -> None:
    """After a removal, ``ChunkStore.usage`` recounts, and ``Admission`` admits stores again."""
    root = tmp_path / "kv"
    url = f"file://{root}?capacity=512KiB&min_free=0&runner={runner}"
    with live([url], slots=16, policy="lru") as engine:
        scanned = Scanned(engine)
        remove(root)
        scanned.until(lambda: scanned.stats.used_bytes == 0)
        assert scanned.refused(48) == 0


def test_nothing_is_refused_while_a_full_disk_has_room_again(
    mount: Callable[..., Path], runner: str
) -> None:
    """``Admission._is_full`` must not count a disk as full once it has free space."""
    disk = mount(MIB)
    filler = disk / "filler"
    filler.write_bytes(bytes(MIB // 2 - 2**15))
    url = f"file://{disk}/kv?min_free=32KiB&runner={runner}"
    with live([url], slots=16, policy="lru") as engine:
        scanned = Scanned(engine)
        filler.unlink()
        scanned.until(lambda: (scanned.stats.free_bytes or 0) > MIB // 3)
        assert scanned.refused(32) == 0
