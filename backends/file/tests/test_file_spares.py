"""A full tier overwrites files of evicted chunks, unless a reader or a hard link uses them."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from kvtier_file import compiled
from kvtier_sdk import TierUnavailableError

KEYS = [index.to_bytes(20, "big") for index in range(6)]

MARK = 0o640


def mark(bench, *keys: bytes) -> None:
    """Change the mode of chunks' files. A store that overwrites a file keeps the mode."""
    for key in keys:
        bench.file(key).chmod(MARK)


def is_marked(bench, key: bytes) -> bool:
    return bench.file(key).stat().st_mode & 0o777 == MARK


@pytest.fixture
async def full(bench, in_both_forms):
    tier = await bench.open(capacity=2 * bench.object_bytes)
    assert await bench.put(tier, *KEYS[:2]) == [None, None]
    return tier


async def test_a_store_into_a_full_tier_makes_no_file(bench, full):
    mark(bench, *KEYS[:2])
    for first, second in (KEYS[2:4], KEYS[4:6]):
        assert await bench.put(full, first, second) == [None, None]
        assert is_marked(bench, first)
        assert is_marked(bench, second)
        assert await bench.loads(full, first, second)
    assert await bench.has(full, *KEYS) == [False] * 4 + [True] * 2
    assert bench.temporaries() == []


async def test_a_reader_of_the_evicted_chunk_goes_on(bench, full):
    path, content = bench.file(KEYS[0]), bench.content(KEYS[0])
    with path.open("rb") as reader:
        assert await bench.put(full, KEYS[2]) == [None]
        assert reader.read() == content
    assert await bench.loads(full, KEYS[1], KEYS[2])
    assert bench.temporaries() == []


async def test_a_spare_that_cannot_be_opened_is_removed(bench, full):
    with bench.file(KEYS[0]).open("rb") as reader:
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert await bench.put(full, KEYS[2]) == [None]
        assert bench.temporaries() == []
    assert await bench.loads(full, KEYS[1], KEYS[2])


async def test_a_copy_made_of_hard_links_stays_as_it_is(bench, full, tmp_path):
    copy = tmp_path / "copy"
    os.link(bench.file(KEYS[0]), copy)
    assert await bench.put(full, KEYS[2]) == [None]
    assert copy.read_bytes() == bench.content(KEYS[0])
    assert await bench.loads(full, KEYS[1], KEYS[2])
    assert bench.temporaries() == []


@pytest.mark.parametrize("direct_io", ["off", "auto"])
async def test_a_file_is_cut_or_grows_to_the_length_of_its_new_chunk(
    bench, in_both_forms, direct_io
):
    tier = await bench.open(capacity=bench.object_bytes, direct_io=direct_io)
    for index, pages in enumerate((25, 1, 25, 24, 25)):
        store, load = bench.pages(KEYS[index], pages, index), bench.empty(KEYS[index])
        assert await tier.store([store]) == [None]
        assert is_marked(bench, KEYS[index]) == (index > 0)
        assert bench.stored_bytes() == store.object_bytes
        assert await tier.load([load]) == [None]
        assert (load.header, load.arrived) == store.buffers
        mark(bench, KEYS[index])
    assert bench.temporaries() == []


async def test_what_is_in_the_place_of_a_chunk_is_not_moved(bench, full):
    path = bench.file(KEYS[0])
    path.unlink()
    path.mkdir()
    (path / "precious").touch()
    assert await bench.put(full, KEYS[2]) == [None]
    assert (path / "precious").exists()
    assert bench.temporaries() == []


async def test_after_a_power_failure_no_name_has_another_chunk(bench):
    tier = await bench.open(capacity=bench.object_bytes, fsync=True)
    await bench.put(tier, KEYS[0])
    mark(bench, KEYS[0])
    assert await bench.put(tier, KEYS[1]) == [None]
    assert not is_marked(bench, KEYS[1])


async def test_no_spare_stays_after_a_failure(bench, full, monkeypatch):
    def fail(*args):
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "batch_io", None)
        patch.setattr(os, "pwritev", fail)
        (verdict,) = await bench.put(full, KEYS[2])
    assert isinstance(verdict, TierUnavailableError)
    assert bench.temporaries() == []
    assert await bench.put(full, KEYS[3]) == [None]
    assert await bench.has(full, *KEYS[:4]) == [False, True, False, True]


async def test_one_chunk_makes_one_spare(bench, make_bench, monkeypatch):
    small = make_bench()
    small.chunk_bytes = 10_000
    small.facts = {"model": "smaller"}
    capacity = bench.object_bytes + 2 * small.object_bytes
    one, other = await small.open(capacity=capacity), await bench.open(capacity=capacity)
    await small.put(one, *KEYS)
    removed = []
    unlink = os.unlink
    monkeypatch.setattr(
        os, "unlink", lambda *args, **kw: removed.append(args) or unlink(*args, **kw)
    )
    assert await bench.put(other, KEYS[0]) == [None]
    names = [name for (name,) in removed]
    assert names.count(bench.file(KEYS[0]).name) == 0
    gone = [key for key, found in zip(KEYS, await small.has(one, *KEYS), strict=True) if not found]
    assert len(gone) == 4
    assert [name for name in names if name.endswith(".kv")] == [
        f"{key.hex()}.kv" for key in gone[1:]
    ]
    assert (bench.temporaries(), small.temporaries()) == ([], [])


async def test_an_open_that_meets_the_lease_ends_no_process(tmp_path):
    path = tmp_path / "spare"
    path.write_bytes(b"spare")
    program = f"""
import fcntl, os, sys
from kvtier_file.file_io import take_over
real = fcntl.fcntl
def patched(fd, command, argument):
    result = real(fd, command, argument)
    if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
        try:
            os.open({str(path)!r}, os.O_RDONLY | os.O_NONBLOCK)
        except BlockingIOError:
            print("met")
    return result
fcntl.fcntl = patched
print(take_over(os.open({str(path)!r}, os.O_WRONLY), 5))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "met\nTrue\n")
