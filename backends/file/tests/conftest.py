"""A file tier in a temporary directory, and transfers in page-aligned memory."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier_file import FileTier
from kvtier_sdk import (
    Namespace,
    RequestContext,
    SystemClock,
    TierContext,
    TierError,
    TierSpec,
    Transfer,
)

PAGE_BYTES = 4096


def aligned_view(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes))


class SetClock(SystemClock):
    """The wall clock of a machine that has the wrong time."""

    ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


class Workbench:
    """Opens tiers on one root and makes chunks to store in them."""

    request = RequestContext("r1")
    facts: dict[str, object]

    def __init__(self, root: Path, chunk_bytes: int = 100_000) -> None:
        self.root = root
        self.chunk_bytes = chunk_bytes
        self.facts = {"model": "m", "dtype": "bf16"}
        self.clock = SetClock()
        self.removed: list[bytes] = []
        self.opened: list[FileTier] = []

    @property
    def payload_bytes(self) -> int:
        return -(-self.chunk_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def object_bytes(self) -> int:
        return PAGE_BYTES + self.payload_bytes

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.facts)

    @property
    def directory(self) -> Path:
        return self.root / self.namespace.fingerprint

    def make(self, **options: object) -> FileTier:
        entry = {"type": "file", "root": str(self.root), "min_free": 0, **options}
        context = TierContext(
            name="file",
            namespace=self.namespace,
            chunk_bytes=self.chunk_bytes,
            header_bytes=PAGE_BYTES,
            payload_bytes=self.payload_bytes,
            clock=self.clock,
            logger=logging.getLogger("kvtier.tier.file"),
            report_removed=self.removed.extend,
        )
        return FileTier(TierSpec.from_options(entry).config, context)

    async def open(self, **options: object) -> FileTier:
        tier = self.make(**options)
        self.opened.append(tier)
        await tier.open()
        return tier

    async def close(self) -> None:
        while self.opened:
            await self.opened.pop().close()

    def empty(self, key: bytes) -> Transfer:
        header, payload = aligned_view(PAGE_BYTES), aligned_view(self.payload_bytes)
        return Transfer(key, self.request, header, payload)

    def content(self, key: bytes, seed: int = 0) -> tuple[bytes, bytes]:
        pattern = key + bytes([seed]) + bytes(range(251))
        text = (pattern * (self.object_bytes // len(pattern) + 1))[: self.object_bytes]
        return text[:PAGE_BYTES], text[PAGE_BYTES:]

    def full(self, key: bytes, seed: int = 0) -> Transfer:
        transfer = self.empty(key)
        transfer.header[:], transfer.payload[:] = self.content(key, seed)
        return transfer

    def holds(self, transfer: Transfer, seed: int = 0) -> bool:
        return (bytes(transfer.header), bytes(transfer.payload)) == self.content(transfer.key, seed)

    async def put(self, tier: FileTier, *keys: bytes) -> Sequence[TierError | None]:
        return await tier.store([self.full(key) for key in keys])

    async def has(self, tier: FileTier, *keys: bytes) -> list[bool]:
        return list(await tier.lookup(keys, self.request))

    async def loads(self, tier: FileTier, *keys: bytes) -> bool:
        batch = [self.empty(key) for key in keys]
        verdicts = await tier.load(batch)
        return verdicts == [None] * len(keys) and all(map(self.holds, batch))

    def file(self, key: bytes) -> Path:
        """The file of a stored chunk."""
        (found,) = self.directory.glob(f"*/{key.hex()}.kv")
        return found

    def temporaries(self) -> list[str]:
        return sorted(os.listdir(self.directory / "tmp"))

    def stored_bytes(self) -> int:
        return sum(found.stat().st_size for found in self.root.glob("*/??/*.kv"))


class Gate:
    """A call that waits in its thread until ``leave`` is set."""

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


@pytest.fixture
def make_gate() -> type[Gate]:
    """:class:`Gate`, for tests that cannot import it."""
    return Gate


@pytest.fixture
async def make_bench(tmp_path: Path) -> AsyncIterator[Callable[[], Workbench]]:
    """Makes benches that share a root, and closes their tiers."""
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
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory, for tests that fill it."""
    at = tmp_path / "mounted"
    at.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(at), b"tmpfs", 0, b"size=2m,mode=700") != 0:
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB in a file: a directory takes room there, unlike in memory."""
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
    """A bench on the small file system."""
    bench = Workbench(mounted / "kv", chunk_bytes=31 * PAGE_BYTES)
    yield bench
    await bench.close()
