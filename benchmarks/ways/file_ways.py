"""Files: the tier, aiofiles, and plain vectors of reads and writes."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import aiofiles
import aiofiles.os

from ways.sockets import in_threads
from ways.tier_way import TierWay
from ways.way import Subject, Way, Work


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


class PlainFiles(Way):
    """The limit: ``pwritev`` and a rename, ``preadv``, past the page cache where that works.

    Args:
        work: the chunks to move.
        root: directory of the files.
        direct_io: the tier's option.
        start: prefix of the files' names.
    """

    name = "preadv/pwritev"

    def __init__(self, work: Work, root: Path, *, direct_io: str, start: str = "") -> None:
        super().__init__(work)
        self._direct = 0 if direct_io == "off" else os.O_DIRECT
        self._names = [f"{root}/{start}{number:020}" for number in range(work.keys)]

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
    """

    name = "file"
    limit = PlainFiles.name
    # The tier's alignment.
    header_bytes = 4096

    def __init__(self, root: Path | None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=root))

    def __enter__(self) -> FileSubject:
        for client in (Aiofiles, PlainFiles):
            self._place(client).mkdir()
        return self

    def __exit__(self, *failure: object) -> None:
        shutil.rmtree(self._directory)

    def clear(self) -> None:
        for client in (Aiofiles, PlainFiles):
            for file in self._place(client).iterdir():
                file.unlink()

    def ways(self, work: Work) -> Sequence[Way]:
        tier_root = self._directory / "tier"
        return [
            TierWay(work, type="file", root=str(tier_root), min_free=0),
            Aiofiles(work, self._place(Aiofiles)),
            PlainFiles(work, self._place(PlainFiles), direct_io="auto"),
        ]

    def _place(self, client: type[Way]) -> Path:
        return self._directory / client.__name__
