"""The compiled part acts like the Python code, or leaves the chunk to the Python code."""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import xxhash
from support.workbench import Workbench

import kvtier_file
from kvtier_file import compiled
from kvtier_file.chunks import SAME_USE_NS, USE_NS, Lifetime, next_use_ns, stored_time_ns
from kvtier_file.compiled import ABSENT, DONE, NOT_DONE
from kvtier_file.config import FileTierConfig
from kvtier_file.directories import Directories
from kvtier_file.namespace import NamespaceDirectory, shard_of
from kvtier_file.temporaries import temporary_names
from kvtier_sdk import TierError

PAGE_BYTES = 4096
KEY = b"\x07" * 20
NEIGHBOUR = b"\x08" * 20
THIRD = b"\x09" * 20
USED_NS = 1_700_000_000_000_000_001
EXPIRED_NS = USED_NS - 10**9
LATEST_NS = USED_NS + 10**12
AGED_NS = USED_NS - 10**10
STORED_NS = stored_time_ns(USED_NS)
LENGTHS = range(2 * PAGE_BYTES, 4 * PAGE_BYTES + 1, PAGE_BYTES)
LIFETIMES = [
    Lifetime(LATEST_NS),
    Lifetime(LATEST_NS, EXPIRED_NS),
    Lifetime(LATEST_NS, EXPIRED_NS, AGED_NS),
    Lifetime(LATEST_NS, AGED_NS, AGED_NS),
]


class Twins:
    """Two namespaces in the same state, one for the compiled part and one for Python."""

    def __init__(self, root: Path, part: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._part = part
        self._monkeypatch = monkeypatch
        self.bench = Workbench(3 * PAGE_BYTES, alignment=PAGE_BYTES)
        self.roots = [root / name for name in ("compiled", "python")]
        self._fds = []
        self.directories = []
        for directory in self.roots:
            directory.mkdir(parents=True)
            self._fds.append(os.open(directory, os.O_RDONLY))
            names = temporary_names("0" * 16)
            config = FileTierConfig(root=directory)
            opener = Directories(config, logging.getLogger())
            self.directories.append(
                NamespaceDirectory(
                    "0" * 64,
                    self._fds[-1],
                    names,
                    opener,
                    Lifetime(LATEST_NS),
                    LENGTHS,
                    direct=True,
                )
            )

    def close(self) -> None:
        for directory, fd in zip(self.directories, self._fds, strict=True):
            directory.temporaries.close()
            os.close(fd)

    def live_by(self, lifetime: Lifetime) -> None:
        for directory in self.directories:
            directory.lifetime = lifetime

    def arrange(self, state: Callable[[Path, Path, bytes], None]) -> None:
        """Store two chunks in both namespaces, and bring ``KEY``'s file into the given state."""
        for root in self.roots:
            for key in (KEY, NEIGHBOUR):
                path = root / shard_of(key) / f"{key.hex()}.kv"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.bench.content(key))
                os.utime(path, ns=(STORED_NS, USED_NS))
                if key == KEY:
                    state(root, path, self.bench.content(key))
            for made in root.rglob("*"):
                # Set the same times in both trees, because the trees were made one after the other.
                if abs(made.lstat().st_mtime - time.time()) < 3600:
                    os.utime(made, ns=(USED_NS, USED_NS), follow_symlinks=False)

    def both(self, act: Callable[[NamespaceDirectory], object]) -> list[object]:
        results = []
        for directory, batch_io in zip(self.directories, (self._part, None), strict=True):
            with self._monkeypatch.context() as patch:
                patch.setattr(compiled, "batch_io", batch_io)
                try:
                    results.append(act(directory))
                except (OSError, TierError) as error:
                    results.append((type(error), str(error)))
        return results

    def trees(self) -> list[dict[str, object]]:
        return [dict(entries(root)) for root in self.roots]


def entries(root: Path) -> Iterator[tuple[str, object]]:
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        times_ns = None if path.is_dir() else (status.st_atime_ns, status.st_mtime_ns)
        yield str(path.relative_to(root)), (status.st_mode, content, times_ns)


@pytest.fixture
def twins(tmp_path, part, monkeypatch) -> Iterator[Twins]:
    twins = Twins(tmp_path / "kv", part, monkeypatch)
    yield twins
    twins.close()


def link_to_a_whole_file(root: Path, path: Path, content: bytes) -> None:
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")


def link_to_a_whole_shard(root: Path, path: Path, content: bytes) -> None:
    path.parent.rename(root / "elsewhere")
    path.parent.symlink_to(root / "elsewhere")


def pipe(root: Path, path: Path, content: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(root: Path, path: Path, content: bytes) -> None:
    path.unlink()
    path.mkdir()


def cut(size_bytes: int) -> Callable[[Path, Path, bytes], None]:
    def state(root: Path, path: Path, content: bytes) -> None:
        os.truncate(path, size_bytes)
        os.utime(path, ns=(STORED_NS, USED_NS))

    return state


def used(used_ns: int) -> Callable[[Path, Path, bytes], None]:
    return lambda root, path, content: os.utime(path, ns=(STORED_NS, used_ns))


def stored(stored_ns: int) -> Callable[[Path, Path, bytes], None]:
    return lambda root, path, content: os.utime(path, ns=(stored_ns, USED_NS))


#: The possible states of a chunk's file, and the compiled part's outcome for each.
STATES = {
    "whole": (lambda root, path, content: None, DONE),
    "used later": (used(LATEST_NS), DONE),
    "of the future": (used(LATEST_NS + 1), NOT_DONE),
    "of the far future": (used(2**63), NOT_DONE),
    "older than time": (used(-5), NOT_DONE),
    "just not expired": (used(EXPIRED_NS), DONE),
    "expired": (used(EXPIRED_NS - 1), NOT_DONE),
    "just not too old": (stored(stored_time_ns(AGED_NS) + 10**6), DONE),
    "too old": (stored(stored_time_ns(AGED_NS) - 10**6), NOT_DONE),
    "stored in the future": (stored(stored_time_ns(LATEST_NS) + 10**6), NOT_DONE),
    "stored in the far future": (stored(2**63), NOT_DONE),
    "read by somebody else": (stored(USED_NS), NOT_DONE),
    "missing": (lambda root, path, content: path.unlink(), ABSENT),
    "without its shard": (lambda root, path, content: shutil.rmtree(path.parent), NOT_DONE),
    "of one page": (cut(2 * PAGE_BYTES), DONE),
    "of two pages": (cut(3 * PAGE_BYTES), DONE),
    "of no page": (cut(PAGE_BYTES), NOT_DONE),
    "empty": (cut(0), NOT_DONE),
    "of a part of a page": (cut(3 * PAGE_BYTES - 1), NOT_DONE),
    "long": (lambda root, path, content: path.write_bytes(content + b"\0"), NOT_DONE),
    "long by a page": (
        lambda root, path, content: path.write_bytes(content + bytes(PAGE_BYTES)),
        NOT_DONE,
    ),
    "link": (link_to_a_whole_file, NOT_DONE),
    "shard is a link": (link_to_a_whole_shard, NOT_DONE),
    "pipe": (pipe, NOT_DONE),
    "directory": (directory, NOT_DONE),
}
#: The outcome of these states depends on the lifetime. If a state's function returns false for a
#: lifetime, the outcome is DONE.
AGES = {
    "expired": lambda lifetime: lifetime.expired_ns == EXPIRED_NS,
    **dict.fromkeys(
        ("of the future", "of the far future", "older than time"),
        lambda lifetime: lifetime.expired_ns,
    ),
    **dict.fromkeys(
        ("too old", "stored in the future", "stored in the far future", "read by somebody else"),
        lambda lifetime: lifetime.aged_ns,
    ),
}
#: Each state that does not depend on age is tested with only one lifetime.
STATES_AND_LIFETIMES = [
    (state, lifetime)
    for number, state in enumerate(STATES)
    for lifetime in (LIFETIMES if state in AGES or "just" in state else LIFETIMES[number % 4 :][:1])
]


def expectation(
    state: str, lifetime: Lifetime
) -> tuple[Callable[[Path, Path, bytes], object], int]:
    """Return the function that makes the state, and the compiled part's expected outcome."""
    arrange, outcome = STATES[state]
    return arrange, DONE if state in AGES and not AGES[state](lifetime) else outcome


@pytest.mark.parametrize(("state", "lifetime"), STATES_AND_LIFETIMES)
@pytest.mark.parametrize("used_ns", [USED_NS + 5, USED_NS - 5, None])
def test_uses(twins, state, used_ns, lifetime):
    twins.live_by(lifetime)
    arrange, expected = expectation(state, lifetime)
    twins.arrange(arrange)
    times_ns = None if used_ns is None else [used_ns, used_ns]

    def touch(directory):
        outcomes = list(directory.touch_batch([KEY, NEIGHBOUR], times_ns))
        found = []
        for key, outcome in zip((KEY, NEIGHBOUR), outcomes, strict=True):
            if outcome != NOT_DONE:
                found.append(outcome == DONE)
            elif used_ns is None:
                chunk = directory.find(key)
                found.append(
                    chunk is not None
                    and chunk.size_bytes in LENGTHS
                    and chunk.used_ns >= lifetime.expired_ns
                )
            else:
                found.append(directory.touch(key, used_ns))
        return outcomes, found

    (outcomes, found), (_, found_by_python) = twins.both(touch)
    assert outcomes == [expected, DONE]
    assert found == found_by_python == [expected == DONE, True]
    ours, theirs = twins.trees()
    assert ours == theirs


@pytest.mark.parametrize("digits", [0, 1, 14, 15, 16, 99])
@pytest.mark.parametrize("later_ns", [-1, 0, SAME_USE_NS - 1, SAME_USE_NS, 10 * SAME_USE_NS])
def test_the_count_of_uses(twins, digits, later_ns):
    known_ns = USED_NS // USE_NS * USE_NS + digits
    twins.arrange(lambda root, path, content: os.utime(path, ns=(known_ns, known_ns)))
    used_ns = known_ns + later_ns

    def touch(directory):
        (outcome,) = directory.touch_batch([KEY], [used_ns])
        if outcome == NOT_DONE:
            directory.touch(KEY, used_ns)
        return directory.find(KEY).used_ns

    ours_ns, theirs_ns = twins.both(touch)
    assert ours_ns == theirs_ns == next_use_ns(known_ns, used_ns)


@pytest.mark.parametrize(("state", "lifetime"), STATES_AND_LIFETIMES)
@pytest.mark.parametrize("used_ns", [USED_NS + 5, USED_NS - 5])
def test_loads(twins, state, used_ns, lifetime):
    twins.live_by(lifetime)
    arrange, expected = expectation(state, lifetime)
    twins.arrange(arrange)

    def read(directory):
        loads = [twins.bench.empty(KEY), twins.bench.empty(NEIGHBOUR)]
        outcomes, lengths, _ = directory.read_batch(loads, [used_ns] * 2, 0)
        verdicts = []
        for load, outcome, size_bytes in zip(loads, outcomes, lengths, strict=True):
            try:
                if outcome == NOT_DONE:
                    directory.read(load, used_ns)
                else:
                    load.received(size_bytes)
                loaded = bytes(load.header) + bytes(load.arrived)
                assert twins.bench.content(load.key).startswith(loaded)
                verdicts.append(len(loaded))
            except (OSError, TierError) as error:
                verdicts.append((type(error), str(error)))
        return list(outcomes), verdicts

    (outcomes, verdicts), (_, by_python) = twins.both(read)
    # Unlike a touch, a load reports a missing file as NOT_DONE.
    assert outcomes == [DONE if expected == DONE else NOT_DONE, DONE]
    assert verdicts == by_python
    ours, theirs = twins.trees()
    assert ours == theirs


def test_loads_at_once_leave_the_time_of_the_store(twins, part):
    twins.arrange(STATES["whole"][0])
    fd = os.open(twins.roots[0], os.O_RDONLY)
    name = f"{KEY.hex()}.kv"
    loads = [twins.bench.empty(KEY) for _ in range(2)]

    def read(load):
        file = (shard_of(KEY), name, load.header, load.payload, USED_NS)
        arguments = fd, 0, 0, True, (LATEST_NS, 0, 0), (file,)
        return b"".join(part.read(*arguments)[0] for _ in range(20_000))

    try:
        with ThreadPoolExecutor() as threads:
            assert all(set(outcomes) == {DONE} for outcomes in threads.map(read, loads))
    finally:
        os.close(fd)
    assert (twins.roots[0] / shard_of(KEY) / name).stat().st_atime_ns == STORED_NS


@pytest.mark.parametrize("state", STATES)
def test_stores(twins, state):
    arrange, _ = STATES[state]
    twins.arrange(arrange)

    def write(directory):
        verdicts = []
        stores = [twins.bench.full(KEY, seed=1), twins.bench.full(NEIGHBOUR, seed=1)]
        names = list(directory.write_batch(stores, [USED_NS + 7] * 2, 0))
        placed = [NOT_DONE] * 2
        if None not in names:
            placed = list(directory.place_batch(list(zip(names, (KEY, NEIGHBOUR), strict=True))))
        for index, store in enumerate(stores):
            try:
                name = names[index] or directory.write(store.key, store.buffers, USED_NS + 7)
                if placed[index] == NOT_DONE:
                    directory.place(name, store.key)
                verdicts.append(None)
            except OSError as error:
                verdicts.append(error.errno)
        return placed, verdicts

    (placed, verdicts), (_, by_python) = twins.both(write)
    assert verdicts == by_python
    # A file is not placed over a directory or in a linked shard.
    usual = state not in ("directory", "shard is a link")
    assert placed[0] == (DONE if usual else NOT_DONE)
    assert (verdicts[0] is None) == usual
    ours, theirs = twins.trees()
    for tree in (ours, theirs):
        # Ignore leftover files, because the C code and the Python code number them differently.
        for name in [name for name in tree if name.startswith("tmp/")]:
            del tree[name]
    assert ours == theirs


def test_a_file_that_is_there_is_not_written_over_before_its_time(twins):
    taken = twins.roots[0] / "tmp" / f"{'0' * 16}-0.tmp"
    taken.parent.mkdir()
    taken.write_bytes(b"another's")
    (names, _) = twins.both(
        lambda directory: directory.write_batch([twins.bench.full(KEY)], [USED_NS], 0)
    )
    assert names == [None]
    assert taken.read_bytes() == b"another's"


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_store_whose_header_cannot_be_sealed_is_left_to_python(part, tmp_path, is_spare):
    def refuse(digest: bytes) -> None:
        assert digest == xxhash.xxh3_128_digest(bytes(PAGE_BYTES))
        raise RuntimeError("refused")

    if is_spare:
        (tmp_path / "a.tmp").touch()
    store = SimpleNamespace(header=b"", payload=bytes(PAGE_BYTES), seal=refuse)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        files = (("a.tmp", is_spare, store, USED_NS),)
        assert list(part.write(fd, PAGE_BYTES, 0, files)) == [NOT_DONE]
    finally:
        os.close(fd)
    assert list(tmp_path.iterdir()) == []


LATE = """
import atexit, importlib.util, os, sys
from types import SimpleNamespace

def store_late():
    store = SimpleNamespace(header=b"", payload=bytes(4096), seal=lambda digest: print("sealed"))
    fd = os.open(sys.argv[2], os.O_RDONLY)
    print(list(part.write(fd, 4096, 0, (("a.tmp", False, store, 1),))))

atexit.register(store_late)  # the exit runs it last
spec = importlib.util.spec_from_file_location("kvtier_file._batch_io", sys.argv[1])
part = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(part)
from kvtier_file import compiled
assert compiled.batch_io is part
"""


def test_no_header_is_sealed_while_the_interpreter_ends(part, tmp_path):
    words = [sys.executable, "-c", LATE, str(part.__file__), str(tmp_path)]
    late = subprocess.run(words, capture_output=True, text=True, check=True)
    assert late.stdout == f"[{NOT_DONE}]\n"


def test_a_store_that_cannot_be_parsed_frees_its_buffers(part):
    payload = bytearray(16)
    with pytest.raises(TypeError):
        part.write(0, 0, 0, (("a.tmp", False, store_of(None, payload), 1),))
    payload.append(1)  # raises BufferError if the memory is still exported


def test_a_write_that_fails_leaves_no_file(part, mounted):
    bench = Workbench(4 * 2**20, alignment=PAGE_BYTES)
    store = bench.full(KEY)
    fd = os.open(mounted, os.O_RDONLY)
    try:
        outcomes = part.write(fd, 0, 0, (("a.tmp", False, store, USED_NS),))
    finally:
        os.close(fd)
    assert list(outcomes) == [NOT_DONE]
    assert os.listdir(mounted) == []


@pytest.mark.parametrize("digest_bytes", [0, 4096])
@pytest.mark.parametrize("state", STATES)
def test_neither_a_descriptor_nor_a_buffer_stays(twins, part, state, digest_bytes):
    twins.arrange(STATES[state][0])
    open_before = os.listdir("/proc/self/fd")
    load, store = twins.bench.empty(KEY), twins.bench.full(KEY)
    fd = os.open(twins.roots[0], os.O_RDONLY)
    name = f"{KEY.hex()}.kv"
    lifetime = LATEST_NS, 0, 0
    file = shard_of(KEY), name, load.header, load.payload, USED_NS
    part.read(fd, twins.bench.chunk_bytes, 0, True, lifetime, (file,))
    part.touch(fd, (LENGTHS[0], LENGTHS[-1]), True, lifetime, ((shard_of(KEY), name, USED_NS),))
    part.write(fd, digest_bytes, 0, (("a.tmp", False, store, USED_NS),))
    part.place(fd, fd, True, (("a.tmp", shard_of(KEY), name),))
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == len(open_before)
    for buffer in (*load.buffers, *store.buffers):
        memory = buffer.obj
        buffer.release()
        memory.close()  # raises BufferError if the memory is still exported


def store_of(header: object, payload: object) -> SimpleNamespace:
    return SimpleNamespace(header=header, payload=payload)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("digest", ("text",)),
        ("read", (0, -1, 0, True, (1, 0, 0), ())),
        ("read", (0, 0, 0, True, (1, 0, 0), [])),
        ("read", (0, 0, 0, True, (1, 0), ())),
        ("touch", (0, (0, 0), True, 1, ())),
        ("touch", (0, (0,), True, (1, 0, 0), ())),
        ("read", (0, 0, 0, True, (1, 0, 0), (("ab", "c.kv", bytearray(1), b"read-only", 1),))),
        ("read", (0, 0, 0, True, (1, 0, 0), (("ab", "c.kv", bytearray(1), bytearray(1)),))),
        ("read", (0, 0, 0, True, (1, 0, 0), (("ab", "c\0.kv", bytearray(1), bytearray(1), 1),))),
        ("write", (0, -1, 0, ())),
        ("write", (0, 0, 0, (("a.tmp", False, store_of(b"", b""), 2**63),))),
        ("write", (0, 0, 0, (("a.tmp", False, store_of(b"", None), 1),))),
        ("write", (0, 0, 0, (("a.tmp", False, store_of(None, b""), 1),))),
        ("write", (0, 0, 0, (("a.tmp", False, None, 1),))),
        ("place", (0, 0, True, (("a.tmp", "ab"),))),
    ],
)
def test_wrong_arguments(part, call, arguments):
    errors = AttributeError, TypeError, ValueError, OverflowError, BufferError
    with pytest.raises(errors):
        getattr(part, call)(*arguments)


@pytest.mark.parametrize("length", [0, 1, 239, 240, 999, 4096, (3 << 20) + 5])
def test_digests_are_those_of_xxhash(part, length):
    payload = os.urandom(length)
    assert part.digest(payload) == xxhash.xxh3_128_digest(payload)


def test_without_a_library_there_are_no_digests(part):
    assert part.use_digests(kvtier_file.__file__) is False
    try:
        with pytest.raises(ValueError, match="no library is loaded"):
            part.digest(b"payload")
        assert compiled.split(b"", 2) == [None, None]
    finally:
        assert compiled.find_digests(part)


# From the page cache, a load of more than 256 KiB is read and digested in pieces.
@pytest.mark.parametrize("chunk_bytes", [100_000, 256 << 10, 600_001])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
async def test_the_tier_brings_the_digests_of_the_bytes_it_moves(
    bench, part, monkeypatch, chunk_bytes, direct_io
):
    bench.chunk_bytes = chunk_bytes
    brought = []

    def note(key, header, payload, digest):
        brought.append((digest, xxhash.xxh3_128_digest(payload[: bench.chunk_bytes])))

    monkeypatch.setattr(compiled, "batch_io", part)
    tier = await bench.open(direct_io=direct_io)
    stores = [bench.full(KEY), bench.pages(NEIGHBOUR), bench.pages(THIRD, chunk_bytes // 8192)]
    loads = [bench.empty(key) for key in (KEY, NEIGHBOUR, THIRD)]
    for store, load in zip(stores, loads, strict=True):
        store.unsealed = load.unverified = note
    assert await tier.store(stores) == [None] * 3
    assert await tier.load(loads) == [None] * 3
    assert len(brought) == 6
    assert all(digest == expected for digest, expected in brought)
    assert [bytes(load.arrived) for load in loads] == [bytes(store.payload) for store in stores]


async def test_the_tier_uses_it(bench, part, monkeypatch):
    calls = []

    class Noting:
        def __getattr__(self, name):
            def call(*arguments):
                results = getattr(part, name)(*arguments)
                calls.append((name, set(results[0] if name == "read" else results)))
                return results

            return call

    monkeypatch.setattr(compiled, "batch_io", Noting())
    tier = await bench.open()
    keys = [bytes([number]) * 20 for number in range(40)]
    assert set(await bench.put(tier, *keys)) == {None}
    assert await bench.has(tier, *keys) == [True] * 40
    loads = [bench.empty(key) for key in keys]
    assert set(await tier.load(loads)) == {None}
    assert all(bench.holds(load) for load in loads)
    assert set(await bench.put(tier, *keys)) == {None}
    await tier.touch(keys)
    # The first store's touch finds no shards, so the store makes them.
    assert calls[0] == ("touch", {NOT_DONE})
    names = ["write", "place", "touch", "read", "touch", "touch"]
    assert calls[1:] == [(name, {DONE}) for name in names]
