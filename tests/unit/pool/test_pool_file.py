"""A pool starts correctly even if another process acts between two steps of the start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pool_process import names_in

from kvtier_sdk import ConfigError, HostPool, PoolLayout
from kvtier_sdk.pool import leases, pool_file

LAYOUT = PoolLayout(2, 100)


@pytest.fixture
def pool(shm_directory: Path) -> Iterator[HostPool]:
    """Yield a pool whose file still has its name, because no worker has joined yet."""
    pool = HostPool.join("one", LAYOUT, directory=str(shm_directory))
    yield pool
    pool.close()


def path_of(shm_directory: Path) -> Path:
    [name] = names_in(shm_directory)
    return shm_directory / name


def no_room(size_bytes: int, directory: Path) -> None:
    raise ConfigError("no room")


def test_a_file_that_lost_its_name_is_not_joined(shm_directory: Path, pool: HostPool) -> None:
    path = path_of(shm_directory)
    fd = os.open(path, os.O_RDWR)
    pool.close()
    assert pool_file.enter_named(fd, path, LAYOUT, 0) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_dead_file_is_not_swept_under_the_name_of_its_successor(
    shm_directory: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(shm_directory)
    dead = os.open(path, os.O_RDWR)
    pool.close()
    successor = HostPool.join("one", LAYOUT, directory=str(shm_directory))
    monkeypatch.setattr(pool_file, "_open_own", lambda _: dead)
    pool_file.sweep(shm_directory)
    assert names_in(shm_directory) == [path.name]
    successor.close()


def test_room_that_a_member_of_the_same_replica_took_is_no_lack(
    shm_directory: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_file, "check_room", no_room)
    assert pool_file._make_named(path_of(shm_directory), LAYOUT, 0) is None
    with pytest.raises(ConfigError, match="no room"):
        pool_file._make_named(shm_directory / "another", LAYOUT, 0)


def test_who_comes_second_makes_no_second_file(shm_directory: Path, pool: HostPool) -> None:
    path = path_of(shm_directory)
    open_before = len(os.listdir("/proc/self/fd"))
    assert pool_file._make_named(path, LAYOUT, 0) is None
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert names_in(shm_directory) == [path.name]


@pytest.mark.parametrize("held_by", ["a member", "a guest", "who stands in the gate"])
def test_a_held_file_is_not_swept(shm_directory: Path, pool: HostPool, held_by: str) -> None:
    path = path_of(shm_directory)
    holder, sweeper = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert not leases.claim_whole(sweeper)
    pool.close()
    if held_by == "a member":
        assert leases.claim(holder, 3)
    elif held_by == "a guest":
        leases.claim_as_guest(holder)
    else:
        assert leases._try_lock(holder, leases._JOINING, 1)
    assert not leases.claim_whole(sweeper)
    os.close(holder)
    assert leases.claim_whole(sweeper), "the lease ends with the descriptor"
    os.close(sweeper)


def test_guests_do_not_keep_each_other_out(shm_directory: Path, pool: HostPool) -> None:
    fds = [os.open(path_of(shm_directory), os.O_RDWR) for _ in range(2)]
    for fd in fds:
        leases.claim_as_guest(fd)
    for fd in fds:
        os.close(fd)
