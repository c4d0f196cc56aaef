import asyncio
import ctypes
import itertools
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import support.workbench
from support.extensions import compile_extension

import kvtier_file
from kvtier_file import FileTier, compiled
from kvtier_file.shared_header import HeaderFile, SharedHeader
from kvtier_sdk import SystemClock, TierSpec, Transfer

PAGE_BYTES = 4096
START_S = float(int(time.time()))


class SetClock(SystemClock):
    """A wall clock that advances by 10 us per read, so uses keep their order within one second."""

    ahead_s = 0.0  # seconds that the test adds to the time
    _reads = itertools.count()  # shared by all instances

    def wall_s(self) -> float:
        return START_S + next(self._reads) * 1e-5 + self.ahead_s


class Workbench(support.workbench.Workbench):
    clock: SetClock

    def __init__(self, root: Path, chunk_bytes: int = 100_000) -> None:
        super().__init__(chunk_bytes, alignment=PAGE_BYTES)
        self.root = root
        self.clock = SetClock()

    @property
    def directory(self) -> Path:
        return self.root / self.namespace.fingerprint

    def make(self, **options: object) -> FileTier:
        entry = {"type": "file", "root": str(self.root), "min_free": 0, **options}
        return self.make_tier(TierSpec.from_options(entry))

    def pages(
        self, key: bytes, count: int = 1, seed: int = 0, *, replace: bool = False
    ) -> Transfer:
        """Return a transfer that stores only the first pages of the chunk's payload."""
        whole = self.full(key, seed, replace=replace)
        return whole.with_payload(whole.payload[: count * PAGE_BYTES])

    def file(self, key: bytes) -> Path:
        (found,) = self.directory.glob(f"*/{key.hex()}.kv")
        return found

    def temporaries(self) -> list[str]:
        return sorted(os.listdir(self.directory / "tmp"))

    def header(self) -> SharedHeader:
        with open(self.root / ".shared" / "header", "rb") as file:
            header_file = HeaderFile(file.fileno())
            with header_file.locked():
                return header_file.read()

    def stored_bytes(self) -> int:
        return sum(found.stat().st_size for found in self.root.glob("*/??/*.kv"))


class Gate:
    def __init__(self, call: Callable[..., int], *, after: int = 0) -> None:
        self._call = call
        self._after = after
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __call__(self, *args: object) -> int:
        if self._after > 0:
            self._after -= 1
        else:
            self.entered.set()
            assert self.leave.wait(30)
        return self._call(*args)

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, 30)
        assert self.entered.is_set()


@pytest.fixture(autouse=True, scope="session")
def patient_open() -> Iterator[None]:
    """Make ``open`` wait for the count of the chunks, even on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier_file.tier._COUNT_S", 30.0)
        yield


@pytest.fixture
def make_gate() -> type[Gate]:
    return Gate


@pytest.fixture(scope="session")
def part(tmp_path_factory) -> ModuleType:
    """Return the compiled part; compile it if it is not installed."""
    if compiled.batch_io is not None:
        return compiled.batch_io
    source = Path(kvtier_file.__file__).with_name("_batch_io.c")
    module = compile_extension(source, tmp_path_factory.mktemp("compiled"))
    if module is None:
        pytest.skip("no C compiler, or no headers of Python")
    assert compiled.find_digests(module)
    return module


@pytest.fixture(autouse=True)
def without_compiled_part(request: pytest.FixtureRequest) -> None:
    """Disable the compiled part in tests that use ``monkeypatch``, which cannot patch C code."""
    if "monkeypatch" in request.fixturenames:
        request.getfixturevalue("monkeypatch").setattr(compiled, "batch_io", None)


@pytest.fixture(params=["compiled", "python"])
def in_both_forms(request, part, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "batch_io", part if request.param == "compiled" else None)


@pytest.fixture
async def make_bench(tmp_path: Path) -> AsyncIterator[Callable[[], Workbench]]:
    made: list[Workbench] = []

    def make() -> Workbench:
        made.append(Workbench(tmp_path / "kv"))
        return made[-1]

    yield make
    for bench in made:
        await bench.close()


@pytest.fixture
def bench(make_bench: Callable[[], Workbench]) -> Workbench:
    return make_bench()


@pytest.fixture
def spoil(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a function of ``os`` fail for the files of some chunks."""

    def spoil(call: str, code: int, *keys: bytes) -> None:
        real = getattr(os, call)
        names = {bench.file(key).name for key in keys}

        def failing(*args: object, **kwargs: object) -> object:
            if names & set(args[:2]):
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, failing)

    return spoil


@pytest.fixture
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "mounted"
    at.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"{getattr(request, 'param', 'size=2m')},mode=700".encode()
    if libc.mount(b"tmpfs", bytes(at), b"tmpfs", 0, options) != 0:
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount an ext4 file system of 4 MiB, where directories use space, unlike in a tmpfs."""
    image, at = tmp_path / "image", tmp_path / "on_disk"
    image.write_bytes(bytes(4 * 2**20))
    at.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, at], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount: {error}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


@pytest.fixture
async def small(mounted: Path) -> AsyncIterator[Workbench]:
    bench = Workbench(mounted / "kv", chunk_bytes=31 * PAGE_BYTES)
    yield bench
    await bench.close()
