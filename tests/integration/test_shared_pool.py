"""Several processes map a host pool, and remove the files that killed processes left."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.pool_process import (
    ChildError,
    PoolProcess,
    PoolProcesses,
    fill,
    names_in,
    pattern,
    wrong_rows,
)

from kvtier_sdk import ConfigError, HostPool, KVTierError, PoolLayout

# Parts of this length do not fill whole cache lines, and rows of parts do not fill whole pages.
PART_BYTES = 5000
SLOTS = 16

Start = Callable[..., PoolProcess]


@pytest.fixture(scope="module")
def processes() -> Iterator[PoolProcesses]:
    processes = PoolProcesses()
    yield processes
    processes.kill()


@pytest.fixture
def start(processes: PoolProcesses) -> Iterator[Start]:
    yield processes.start
    processes.take_back()


def join_line(
    shm_directory: Path, workers: int, worker: int | None, *, replica: str = "one", more: str = ""
) -> str:
    layout = f"PoolLayout({SLOTS}, {PART_BYTES}, workers={workers})"
    return f"join({replica!r}, {layout}, worker={worker}, directory={str(shm_directory)!r}{more})"


def start_replica(
    start: Start, shm_directory: Path, workers: int, replica: str = "one"
) -> tuple[PoolProcess, list[PoolProcess]]:
    members = [None, *range(workers)]
    processes = [start() for _ in members]
    for process, member in zip(processes, members, strict=True):
        process.send(join_line(shm_directory, workers, member, replica=replica))
    for process in processes:
        process.answer()
    return processes[0], processes[1:]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_scheduler_sees_whole_slots_that_workers_wrote_in_parts(
    start: Start, shm_directory: Path, workers: int
) -> None:
    scheduler, members = start_replica(start, shm_directory, workers)
    assert names_in(shm_directory) == [], "all have it, so it has no name any more"
    assert scheduler.run("pool.absent()") == []
    for worker, member in enumerate(members):
        member.send(f"fill(pool, {worker})")
    for member in members:
        member.answer()

    expected = bytearray(PoolLayout(SLOTS, PART_BYTES, workers).chunk_bytes)
    stride = -(-PART_BYTES // 64) * 64
    for slot in range(SLOTS):
        for worker in range(workers):
            start_at = worker * stride
            expected[start_at : start_at + PART_BYTES] = pattern(worker, slot, PART_BYTES).tobytes()
        assert bytes.fromhex(scheduler.run(f"pool.view({slot}).hex()")) == expected


def test_what_all_workers_hold_is_stored_once(start: Start, shm_directory: Path) -> None:
    layout = f"PoolLayout({SLOTS}, {PART_BYTES}, workers=3, replicated=True)"
    processes = [start() for _ in range(4)]
    for process, worker in zip(processes, [None, 0, 1, 2], strict=True):
        process.run(f"join('one', {layout}, worker={worker}, directory={str(shm_directory)!r})")
    scheduler, first, *others = processes
    assert scheduler.run("pool.chunk_bytes") == PART_BYTES
    first.run("fill(pool, 0)")
    for worker, other in enumerate(others, 1):
        assert other.run(f"wrong_rows(pool, 0, part_of={worker})") == 0
        with pytest.raises(ChildError, match="read-only"):
            other.run(f"fill(pool, {worker})")
    assert names_in(shm_directory) == []


def test_a_worker_that_dies_before_all_are_there_is_replaced(
    start: Start, shm_directory: Path
) -> None:
    scheduler, one, other, again = (start() for _ in range(4))
    scheduler.run(join_line(shm_directory, 2, None))
    one.run(join_line(shm_directory, 2, 0))
    one.run("fill(pool, 0)")
    one.kill()
    other.run(join_line(shm_directory, 2, 1))
    assert scheduler.run("pool.absent()") == ["worker 0"]
    assert len(names_in(shm_directory)) == 1, "one is missing, who must find it"
    again.run(join_line(shm_directory, 2, 0))
    assert again.run("wrong_rows(pool, 0)") == 0, "it is the same pool"
    assert names_in(shm_directory) == []


@pytest.mark.parametrize("replica", ["one", "another"])
def test_the_next_start_removes_what_a_killed_creator_left(
    start: Start, shm_directory: Path, replica: str
) -> None:
    creator, next_one = start(), start()
    creator.run(join_line(shm_directory, 2, None))
    creator.run("fill(pool, 0)")
    creator.kill()
    [left] = names_in(shm_directory)
    inode = (shm_directory / left).stat().st_ino
    next_one.run(join_line(shm_directory, 2, None, replica=replica))
    [name] = names_in(shm_directory)
    assert (shm_directory / name).stat().st_ino != inode
    assert (name == left) == (replica == "one")
    assert next_one.run("wrong_rows(pool, 0)") == SLOTS, "it is a new pool"


def test_nothing_is_left_of_a_pool_that_all_had_mapped(start: Start, shm_directory: Path) -> None:
    scheduler, members = start_replica(start, shm_directory, 2)
    members[0].run("fill(pool, 0)")
    members[1].send("[fill(pool, 1) for _ in range(1000000)]")
    members[1].kill()
    assert scheduler.run("pool.absent()") == ["worker 1"]
    assert scheduler.run("wrong_rows(pool, 0)") == 0, "the others' bytes are as they were"
    assert scheduler.run("wrong_rows(pool, 1, part_of=0)") == SLOTS, "the check can fail"
    for process in (scheduler, members[0]):
        process.kill()
    assert list(shm_directory.iterdir()) == []


def test_who_ends_in_good_order_before_the_others_came_leaves_nothing(
    start: Start, shm_directory: Path
) -> None:
    scheduler, worker = start(), start()
    scheduler.run(join_line(shm_directory, 2, None))
    worker.run(join_line(shm_directory, 2, 0))
    scheduler.run("pool.close()")
    assert len(names_in(shm_directory)) == 1, "the worker still has it"
    worker.run("pool.close()")
    assert names_in(shm_directory) == []


def test_a_pool_that_a_child_still_maps_is_not_swept(start: Start, shm_directory: Path) -> None:
    scheduler, child, next_one = start(), start(), start()
    scheduler.run(join_line(shm_directory, 2, None))
    [name] = names_in(shm_directory)
    child.run(f"attach({str(shm_directory / name)!r})")
    scheduler.kill()
    next_one.run(join_line(shm_directory, 2, None, replica="two"))
    assert len(names_in(shm_directory)) == 2
    child.kill()
    next_one.run(join_line(shm_directory, 2, None, replica="three"))
    assert name not in names_in(shm_directory)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (PoolLayout(SLOTS, PART_BYTES, 2), {}, "the scheduler of this host pool is already there"),
        (PoolLayout(SLOTS + 1, PART_BYTES, 2), {"worker": 0}, "expected .*slots=17,"),
        (PoolLayout(SLOTS, PART_BYTES + 1, 2), {"worker": 0}, "expected .*part_bytes=5001,"),
        (PoolLayout(SLOTS, PART_BYTES, 3), {"worker": 0}, "expected .*workers=3,"),
        (PoolLayout(SLOTS, PART_BYTES, 2, True), {"worker": 0}, "expected .*replicated=True"),
        (PoolLayout(SLOTS, PART_BYTES, 2), {"worker": 2}, "workers are numbered 0 to 1"),
        (PoolLayout(SLOTS, PART_BYTES, 2), {"worker": -1}, "workers are numbered 0 to 1"),
    ],
)
def test_who_does_not_fit_is_told(
    shm_directory: Path, layout: PoolLayout, options: dict[str, int], message: str
) -> None:
    pool = HostPool.join("one", PoolLayout(SLOTS, PART_BYTES, 2), directory=str(shm_directory))
    with pytest.raises(ConfigError, match=message):
        HostPool.join("one", layout, directory=str(shm_directory), **options)
    assert pool.absent() == ["worker 0", "worker 1"]
    pool.close()
    assert names_in(shm_directory) == []


def test_another_version_is_told(shm_directory: Path) -> None:
    pool = HostPool.join("one", PoolLayout(SLOTS, PART_BYTES), directory=str(shm_directory))
    [name] = names_in(shm_directory)
    with open(shm_directory / name, "r+b") as file:
        file.seek(pool.layout.size_bytes + 8)
        file.write(struct.pack("<I", 7))
    with pytest.raises(ConfigError, match="has format 7.*one version of kvtier-sdk"):
        HostPool.join("one", PoolLayout(SLOTS, PART_BYTES), worker=0, directory=str(shm_directory))
    with pytest.raises(ConfigError, match="has format 7.*one version of kvtier-sdk"):
        HostPool.attach(pool.fd)
    pool.close()


def test_a_file_that_is_no_pool_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    with pytest.raises(ConfigError, match="not a host pool of kvtier: give its layout"):
        HostPool.attach(str(path))
    with pytest.raises(ConfigError, match="the file has 10000 bytes; .* needs 12288"):
        HostPool.attach(str(path), PoolLayout(3, 4096))
    with pytest.raises(ConfigError, match="cannot be opened .*pass_fds"):
        HostPool.attach(str(path / "not there"))
    with pytest.raises(ConfigError, match="cannot be opened .*pass_fds"):
        HostPool.attach(999_999)


def test_a_name_that_is_somebody_elses_is_neither_followed_nor_removed(
    shm_directory: Path, tmp_path: Path
) -> None:
    pool = HostPool.join("one", PoolLayout(SLOTS, PART_BYTES), directory=str(shm_directory))
    [name] = names_in(shm_directory)
    pool.close()
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (shm_directory / name).symlink_to(target)
    with pytest.raises(ConfigError, match="is not a host pool of this user: remove it"):
        HostPool.join("one", PoolLayout(SLOTS, PART_BYTES), directory=str(shm_directory))
    assert target.read_bytes() == b"precious"
    (shm_directory / name).unlink()
    os.mkfifo(shm_directory / name)
    with pytest.raises(ConfigError, match="is not a host pool of this user: remove it"):
        HostPool.join("one", PoolLayout(SLOTS, PART_BYTES), directory=str(shm_directory))


def test_only_its_owner_can_open_a_pool(shm_directory: Path) -> None:
    pool = HostPool.join("one", PoolLayout(SLOTS, PART_BYTES), directory=str(shm_directory))
    [name] = names_in(shm_directory)
    assert (shm_directory / name).stat().st_mode & 0o777 == 0o600
    pool.close()


def test_a_child_maps_the_pool_by_its_inherited_descriptor(start: Start) -> None:
    pool = HostPool.create(PoolLayout(SLOTS, PART_BYTES, workers=2))
    assert not os.get_inheritable(pool.fd)
    child, worker = start(pass_fds=(pool.fd,)), start(pass_fds=(pool.fd,))
    child.run(f"attach({pool.fd})")
    worker.run(f"attach({pool.fd}, worker=1)")
    assert pool.absent() == ["worker 0"]
    fill(pool, 0)
    worker.run("fill(pool, 1)")
    assert child.run("wrong_rows(pool, 0) + wrong_rows(pool, 1)") == 0
    assert wrong_rows(pool, 1) == 0
    with pytest.raises(ChildError, match="ConfigError: worker 1 .* is already there"):
        child.run(f"attach({pool.fd}, worker=1)")
    worker.kill()
    child.run(f"attach({pool.fd}, worker=1)")
    child.kill()
    assert wrong_rows(pool, 1) == 0
    pool.close()


def test_a_file_of_somebody_else_is_mapped_with_a_layout(start: Start, shm_directory: Path) -> None:
    path = shm_directory / "vllm.mmap"
    rows = np.arange(3 * 8192, dtype=np.uint32).view(np.uint8)[: 3 * 8192]
    path.write_bytes(rows.tobytes())
    pool = HostPool.attach(str(path), PoolLayout(3, 8192))
    assert [bytes(pool.view(slot)) for slot in range(3)] == [
        bytes(row) for row in rows.reshape(3, 8192)
    ]
    pool.view(1)[:] = b"x" * 8192
    assert path.read_bytes()[8192:16384] == b"x" * 8192
    pool.close()


def test_nobody_can_shrink_a_pool_under_its_processes() -> None:
    pool = HostPool.create(PoolLayout(SLOTS, PART_BYTES))
    for size_bytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size_bytes)
    pool.close()


def test_a_pool_of_one_process_has_nothing_to_share() -> None:
    pool = HostPool(SLOTS, PART_BYTES)
    with pytest.raises(KVTierError, match="no other process can map it"):
        _ = pool.fd
    with pytest.raises(KVTierError, match="no other process can map it"):
        pool.absent()
    pool.close()


def test_closing_gives_descriptor_and_place_back() -> None:
    pool = HostPool.create(PoolLayout(SLOTS, PART_BYTES))
    handle = os.dup(pool.fd)
    worker = HostPool.attach(handle, worker=0)
    worker.close()
    HostPool.attach(handle, worker=0).close()
    fd = pool.fd
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(KVTierError, match="the host pool is closed"):
        _ = pool.fd
    os.close(handle)


@pytest.mark.parametrize("action", ["pool.close()", "globals().pop('pool')", "os.getpid()"])
def test_a_forked_copy_takes_nothing_from_its_parent(
    start: Start, shm_directory: Path, action: str
) -> None:
    scheduler, worker = start(), start()
    scheduler.run(join_line(shm_directory, 1, None))
    assert scheduler.run(f"fork({action!r})") == 0
    assert len(names_in(shm_directory)) == 1, "the name is the parent's to remove"
    with pytest.raises(ChildError, match="the scheduler of this host pool is already there"):
        worker.run(join_line(shm_directory, 1, None))
    worker.run(join_line(shm_directory, 1, 0))
    worker.run("fill(pool, 0)")
    assert scheduler.run("wrong_rows(pool, 0)") == 0
    assert names_in(shm_directory) == []
