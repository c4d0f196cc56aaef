"""Files: the tier, vLLM's C extension, aiofiles, and plain vectors of reads and writes."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ways.engine_way import EngineWay
from ways.sockets import in_threads
from ways.tier_way import TierWay
from ways.way import Subject, Way, Work

# Peers, each left out of the table where it is not installed.
try:
    import aiofiles
    import aiofiles.os
except ImportError:
    aiofiles = None  # type: ignore[assignment]
try:
    from vllm import fs_io_C as vllm_io
except ImportError:
    vllm_io = None


class Aiofiles(Way):
    """Each chunk written to another name and renamed, and read back, with aiofiles."""

    name = "aiofiles"

    def __init__(self, work: Work, root: Path) -> None:
        super().__init__(work)
        self._root = root

    async def store(self) -> None:
        async def store(number: int) -> None:
            path = f"{self._root}/{number:020}"
            async with aiofiles.open(f"{path}.tmp", "wb") as file:
                await file.write(self.work.value(number))
            await aiofiles.os.rename(f"{path}.tmp", path)

        await self.work.each(store)

    async def load(self) -> None:
        async def load(number: int) -> None:
            async with aiofiles.open(f"{self._root}/{number:020}", "rb") as file:
                await file.read()

        await self.work.each(load)


class VLLMFiles(Way):
    """The C extension of vLLM's tier for files: a batch a call, from as many threads.

    All files are in one directory; vLLM spreads them over a million, which costs it more. It asks
    for O_DIRECT, as vLLM does where a probe succeeds. Payloads only: it stores no header.

    Args:
        work: the chunks to move.
        root: directory of the files.
        start: prefix of the files' names.
        stale: prefix of files to remove, one before each that is stored.
    """

    name = "vllm.fs_io_C"

    def __init__(
        self, work: Work, root: Path, *, start: str = "", stale: str | None = None
    ) -> None:
        super().__init__(work)
        self._root = root
        self._start = start
        self._stale = stale

    async def store(self) -> None:
        def store(paths: list[str], views: list[memoryview]) -> None:
            if self._stale is not None:
                for path in paths:
                    os.unlink(f"{self._root}/{self._stale}{Path(path).name[len(self._start) :]}")
            vllm_io.batch_store_block([f"{path}.tmp" for path in paths], paths, views, True)

        self._each(store)

    async def load(self) -> None:
        def load(paths: list[str], views: list[memoryview]) -> None:
            vllm_io.batch_load_block(paths, views, True)

        self._each(load)

    def _each(self, move: Callable[[list[str], list[memoryview]], None]) -> None:
        batches = self._batches()

        def lane(slots: list[list[memoryview]]) -> None:
            for paths in batches:
                move(paths, [payload for _, payload in slots[: len(paths)]])

        in_threads(lane, self.work.lanes())

    def _batches(self) -> Iterator[list[str]]:
        step = self.work.batch_chunks
        names = [f"{self._root}/{self._start}{number:064}.bin" for number in range(self.work.keys)]
        return iter([names[start : start + step] for start in range(0, len(names), step)])


class TierAlone(TierWay):
    """The tier without its runner: no process, no digests."""

    name = "the tier alone"


class PlainFiles(Way):
    """The limit: ``pwritev`` and a rename, ``preadv``, past the page cache where that works.

    Args:
        work: the chunks to move.
        root: directory of the files.
        direct_io: the tier's option.
        start: prefix of the files' names.
        stale: prefix of files to remove, one before each that is stored.
    """

    name = "preadv/pwritev"

    def __init__(
        self, work: Work, root: Path, *, direct_io: str, start: str = "", stale: str | None = None
    ) -> None:
        super().__init__(work)
        self._direct = 0 if direct_io == "off" else os.O_DIRECT
        self._names = [f"{root}/{start}{number:020}" for number in range(work.keys)]
        self._stale = {
            name: f"{root}/{stale}{number:020}"
            for number, name in enumerate(self._names)
            if stale is not None
        }

    async def store(self) -> None:
        self._each(self._store)

    async def load(self) -> None:
        self._each(self._load)

    def _each(self, move: Callable[[str, list[memoryview]], None]) -> None:
        rest = iter(self._names)

        def lane(slots: list[list[memoryview]]) -> None:
            for name, buffers in zip(rest, itertools.cycle(slots), strict=False):
                move(name, buffers)

        in_threads(lane, self.work.lanes())

    def _store(self, name: str, buffers: list[memoryview]) -> None:
        if name in self._stale:
            os.unlink(self._stale[name])
        fd = self._open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT)
        os.pwritev(fd, buffers, 0)
        os.close(fd)
        os.rename(f"{name}.tmp", name)

    def _load(self, name: str, buffers: list[memoryview]) -> None:
        fd = self._open(name, os.O_RDONLY)
        os.preadv(fd, buffers, 0)
        os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        fd = os.open(name, flags, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, self._direct)
        except OSError:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return fd


class FileSubject(Subject):
    """A directory.

    Args:
        root: its parent; the system's directory for temporary files if ``None``.
        keep: remove nothing before the end. Each round has its own directories and keys then.
        full: there is room for the chunks of one round, each with its own keys. So each store
            has to remove a chunk: the tier by its capacity, the others the oldest.
    """

    name = "file"
    limit = PlainFiles.name
    # The tier's alignment.
    header_bytes = 4096

    def __init__(self, root: Path | None, *, keep: bool = False, full: bool = False) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=root))
        self._keep = keep
        self._full = full
        self._rounds = 0
        self._fillings: Counter[int] = Counter()

    def __enter__(self) -> FileSubject:
        return self

    def __exit__(self, *failure: object) -> None:
        shutil.rmtree(self._directory)

    def clear(self) -> None:
        if self._full:
            return
        for client in () if self._keep else (Aiofiles, PlainFiles, VLLMFiles):
            for file in self._place(client).iterdir():
                file.unlink()

    def ways(self, work: Work) -> Sequence[Way]:
        if self._full:
            return self._full_ways(work)
        start = 0
        if self._keep:
            self._rounds += 1
            start = self._rounds * work.keys
        tier = {"type": "file", "min_free": 0}
        ways = [
            EngineWay(
                work, start=start, keep=self._keep, root=str(self._directory / "tier"), **tier
            ),
            TierAlone(
                work,
                key_start=b"%d" % start,
                keep=self._keep,
                root=str(self._directory / "alone"),
                **tier,
            ),
            PlainFiles(work, self._place(PlainFiles), direct_io="auto"),
        ]
        if aiofiles is not None:
            ways.append(Aiofiles(work, self._place(Aiofiles)))
        if vllm_io is not None:
            ways.append(VLLMFiles(work, self._place(VLLMFiles)))
        return ways

    def _full_ways(self, work: Work) -> Sequence[Way]:
        filling = self._fillings[work.chunk_bytes]
        self._fillings[work.chunk_bytes] += 1
        names = {"start": f"{filling}-", "stale": f"{filling - 1}-" if filling else None}
        roots = {
            name: self._directory / f"{name}-{work.chunk_bytes}"
            for name in ("tier", "plain", "vllm")
        }
        for root in roots.values():
            root.mkdir(mode=0o700, exist_ok=True)
        # A little more than the chunks, for those that are written and those that stay meanwhile.
        capacity = (work.keys + work.at_a_time * work.batch_chunks) * work.object_bytes
        tier = {"type": "file", "min_free": 0, "capacity": capacity}
        ways: list[Way] = [
            EngineWay(work, start=filling * work.keys, keep=True, root=str(roots["tier"]), **tier),
            PlainFiles(work, roots["plain"], direct_io="auto", **names),
        ]
        if vllm_io is not None:
            ways.append(VLLMFiles(work, roots["vllm"], **names))
        return ways

    def _place(self, client: type[Way]) -> Path:
        place = self._directory / f"{client.__name__}-{self._rounds}"
        place.mkdir(exist_ok=True)
        return place
