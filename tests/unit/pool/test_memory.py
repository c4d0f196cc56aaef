from __future__ import annotations

import logging
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier_sdk import ConfigError, HostPool, PoolLayout
from kvtier_sdk.pool import limits, memory

MIB = 1 << 20
LAYOUT = PoolLayout(8, MIB, workers=2)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no huge pages, because the tests count a fault for each page of 4 KiB."""
    monkeypatch.setattr(memory, "ask_for_huge_pages", lambda mapping: None)


def attached(layout: PoolLayout = LAYOUT, *, prefault: bool = True) -> HostPool:
    creator = HostPool.create(layout)
    pool = HostPool.attach(creator.fd, prefault=prefault)
    creator.close()
    return pool


MAKE: dict[str, Callable[..., HostPool]] = {
    "of one process": lambda: HostPool(8, 2 * MIB),
    "shared": lambda: HostPool.create(LAYOUT),
    "attached": attached,
}


def faults_of_touching(pool: HostPool) -> int:
    pages = np.arange(0, pool.chunk_bytes, mmap.PAGESIZE)
    views = [np.frombuffer(pool.view(slot), np.uint8) for slot in range(pool.slots)]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for view in views:
        view[pages] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("make", MAKE.values(), ids=list(MAKE))
def test_no_page_faults_are_left_for_the_engine(make: Callable[..., HostPool]) -> None:
    pages = LAYOUT.size_bytes // mmap.PAGESIZE
    pool = make()
    assert faults_of_touching(pool) < pages // 4
    pool.close()


@pytest.mark.parametrize("make", [HostPool.create, attached])
def test_without_prefaulting_pages_are_mapped_on_first_use(make: Callable[..., HostPool]) -> None:
    pool = make(LAYOUT, prefault=False)
    assert faults_of_touching(pool) >= LAYOUT.size_bytes // mmap.PAGESIZE // 4
    pool.close()


@pytest.mark.parametrize("stretch_bytes", [64 * MIB, 3 * mmap.PAGESIZE])
def test_prefaulting_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch,
    stretch_bytes: int,
) -> None:
    monkeypatch.setattr(memory, "_STRETCH_BYTES", stretch_bytes)
    pool = HostPool.create(PoolLayout(1, MIB), prefault=False)
    content = np.random.default_rng(1).bytes(MIB)
    pool.view(0)[:] = content
    assert pool._mapping is not None
    memory.prefault(pool._mapping, pool.fd)
    assert pool.view(0) == content
    pool.close()


def test_every_stretch_is_faulted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STRETCH_BYTES", 3 * mmap.PAGESIZE)
    pool = HostPool(1, 10 * MIB)
    assert faults_of_touching(pool) < 10 * MIB // mmap.PAGESIZE // 4
    pool.close()


def test_an_old_kernel_maps_pages_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 999)
    for make in MAKE.values():
        pool = make()
        assert faults_of_touching(pool) >= LAYOUT.size_bytes // mmap.PAGESIZE // 4
        pool.close()


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 1 PiB, and .* are free in .*: make the pool smaller, or "
    ):
        HostPool(1 << 30, 1 << 20)
    with pytest.raises(ConfigError, match="needs 1 PiB"):
        HostPool.create(PoolLayout(1 << 30, 1 << 20))


def test_the_tightest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = [limits.Room("here", 2 * MIB, "do this"), limits.Room("there", MIB, "do that")]
    monkeypatch.setattr(limits, "rooms_of_cgroups", lambda: iter(rooms))
    limits.check_room(MIB)
    with pytest.raises(ConfigError) as failure:
        HostPool(3, MIB)
    assert str(failure.value) == (
        "the host pool needs 3 MiB, and 1 MiB are free in there: make the pool smaller, or do that"
    )


def control_groups(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "top/pod/memory.max": "1000\n",
    "top/pod/memory.current": "900\n",
    "top/pod/memory.stat": "anon 850\ninactive_file 30\nactive_file 20\n",
    "top/pod/box/memory.max": "max\n",
    "top/pod/box/memory.current": "1\n",
    "top/pod/box/memory.stat": "anon 1\n",
}
V1 = {
    "top/memory/box/memory.limit_in_bytes": "1000\n",
    "top/memory/box/memory.usage_in_bytes": "900\n",
    "top/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\n",
}


@pytest.mark.parametrize(
    ("membership", "files", "where"),
    [
        ("0::/pod/box\n", V2, "pod"),
        ("9:cpu:/x\n4:memory:/box\n", V1, "memory/box"),
        # In a container, /proc shows the path of the container's group on the host, but the mount
        # begins at this group.
        ("4:memory:/docker/1234\n", {k.replace("box/", ""): v for k, v in V1.items()}, "memory"),
        ("0::/../elsewhere\n", {k.replace("pod/", ""): v for k, v in V2.items()}, ""),
    ],
)
def test_a_control_groups_limit_counts(
    tmp_path: Path, membership: str, files: dict[str, str], where: str
) -> None:
    control_groups(tmp_path, {"proc/self/cgroup": membership, **files})
    [room] = limits.rooms_of_cgroups(tmp_path / "proc", tmp_path / "top")
    assert room.free_bytes == 150, "what is not used, and what the file cache would give back"
    assert room.where == f"the memory limit of {tmp_path / 'top' / where}"


@pytest.mark.parametrize("membership", ["", "0::/\n", "3:cpu:/\n"])
def test_no_limit_is_no_limit(tmp_path: Path, membership: str) -> None:
    control_groups(tmp_path, {"proc/self/cgroup": membership})
    assert list(limits.rooms_of_cgroups(tmp_path / "proc", tmp_path / "top")) == []
    assert list(limits.rooms_of_cgroups(tmp_path / "none", tmp_path / "top")) == []


def test_a_pool_can_be_checked_without_being_made() -> None:
    HostPool.check(LAYOUT)
    HostPool.check(LAYOUT, directory=None)
    with pytest.raises(ConfigError, match="needs 1 PiB"):
        HostPool.check(PoolLayout(1 << 30, 1 << 20))
    with pytest.raises(ConfigError, match="a shared host pool needs /none"):
        HostPool.check(LAYOUT, directory="/none")


def test_a_failure_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(mapping: mmap.mmap, fd: int | None) -> None:
        raise ConfigError("no")

    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(memory, "prefault", fail)
    for make in MAKE.values():
        # Keep the traceback, which keeps all local objects alive. Otherwise garbage collection
        # could close descriptors.
        with pytest.raises(ConfigError, match="no") as failure:
            make()
        assert len(os.listdir("/proc/self/fd")) == open_before
        assert failure.tb


def test_parts_that_outlive_the_pool_are_named(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool.create(LAYOUT)
    kept = pool.part(1)
    kept[:] = 7
    assert kept.shape == (8, MIB)
    assert kept.strides == (LAYOUT.row_bytes, 1)
    with caplog.at_level(logging.WARNING, logger="kvtier.pool"):
        pool.close()
    assert "views of it are in use;" in caplog.text
    assert (kept == 7).all()
