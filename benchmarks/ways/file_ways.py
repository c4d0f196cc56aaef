"""The programs for files: the tier, vLLM's C extension, and plain vectored reads and writes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ways.compiled_files import CompiledFiles, batch_io
from ways.engine_way import EngineWay
from ways.way import Subject, Way, Work

# Only vLLM's environment has the extension. Elsewhere, the extension is not measured.
try:
    from vllm import fs_io_C as vllm_io
except ImportError:
    vllm_io = None


class PlainFiles(Way):
    """The limit: plain ``preadv`` and ``pwritev``, which bypass the page cache if possible."""

    def __init__(
        self, work: Work, root: Path, *, start: str = "", stale: str | None = None
    ) -> None:
        super().__init__(work)
        self._start = f"{root}/{start}"
        self._stale = None if stale is None else f"{root}/{stale}"

    async def store(self) -> None:
        self._each(self._replace)

    async def load(self) -> None:
        self._each(self._read)

    def _each(self, move: Callable[[range], None]) -> None:
        def lane(rest: Iterator[range]) -> None:
            for numbers in rest:
                move(numbers)

        self.work.in_threads(lane, self._calls())

    def _replace(self, numbers: range) -> None:
        for number in numbers if self._stale is not None else ():
            os.unlink(f"{self._stale}{number:020}")
        self._write(numbers)

    def _calls(self) -> list[range]:
        """Return the file numbers of each call: one file or, in subclasses, a batch."""
        return [range(number, number + 1) for number in range(self.work.keys)]

    def _write(self, numbers: range) -> None:
        for number in numbers:
            name = f"{self._start}{number:020}"
            fd = self._open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT)
            os.pwritev(fd, self.work.slots[number], 0)
            os.close(fd)
            os.rename(f"{name}.tmp", name)

    def _read(self, numbers: range) -> None:
        for number in numbers:
            fd = self._open(f"{self._start}{number:020}", os.O_RDONLY)
            os.preadv(fd, self.work.slots[number], 0)
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        fd = os.open(name, flags, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return fd


class VLLMFiles(PlainFiles):
    """The C extension of vLLM's tier for files: a batch per call, from ``at_a_time`` threads.

    All files are in one directory. vLLM itself uses a million directories, which costs more. This
    class always uses O_DIRECT; vLLM first tests whether O_DIRECT works. No headers are stored.
    """

    def _calls(self) -> list[range]:
        return self.work.batches()

    def _write(self, numbers: range) -> None:
        paths, payloads = self._files(numbers)
        vllm_io.batch_store_block([f"{path}.tmp" for path in paths], paths, payloads, True)

    def _read(self, numbers: range) -> None:
        vllm_io.batch_load_block(*self._files(numbers), True)

    def _files(self, numbers: range) -> tuple[list[str], list[memoryview]]:
        paths = [f"{self._start}{number:020}" for number in numbers]
        return paths, [self.work.slots[number][1] for number in numbers]


class CompiledWay(PlainFiles):
    """An upper bound for the tier: only its compiled part, with digests and O_DIRECT."""

    def __init__(self, work: Work, root: Path) -> None:
        super().__init__(work, root)
        self._files = CompiledFiles(root, direct=True)
        self._chunks = [(f"{number:020}", *buffers) for number, buffers in enumerate(work.slots)]

    async def close(self) -> None:
        self._files.close()

    def _calls(self) -> list[range]:
        return self.work.batches()

    def _write(self, numbers: range) -> None:
        self._files.store([self._chunks[number] for number in numbers])

    def _read(self, numbers: range) -> None:
        self._files.load([self._chunks[number] for number in numbers])


class FileSubject(Subject):
    """The file tier and its peers, in one directory. ``backends.py --help`` says more."""

    # O_DIRECT needs aligned payloads, so the header is as long as the file tier's alignment.
    header_bytes = 4096

    def __init__(self, root: Path, *, keep: bool = False, full: bool = False) -> None:
        super().__init__(root)
        self.url = f"file://{self.directory}/tier?capacity=2GiB"
        self._keep = keep
        self._full = full

    def clear(self) -> None:
        patterns = () if self._keep or self._full else ("client-*/*", "compiled-*/00/*")
        for file in chain.from_iterable(map(self.directory.glob, patterns)):
            file.unlink()

    def ways(self, work: Work) -> Mapping[str, Callable[[int], Way]]:
        length = work.chunk_bytes
        tier = {"type": "file", "min_free": 0}
        if self._full:
            # Leave room for the stored chunks, and for the batches that are being written.
            chunks = work.keys + work.at_a_time * work.batch_chunks
            tier["capacity"] = chunks * work.object_bytes

        def place(name: str, number: int | None = None) -> Path:
            own = "" if number is None or not self._keep else f"-{number}"
            place = self.directory / f"{name}-{length}{own}"
            place.mkdir(mode=0o700, exist_ok=True)
            return place

        def engine(number: int, name: str = "tier", **options: Any) -> Way:
            start = (number + 1) * work.keys if self._keep or self._full else 0
            keep, root = self._keep or self._full, str(place(name))
            return EngineWay(work, start=start, keep=keep, root=root, **tier, **options)

        def files(kind: type[PlainFiles], number: int) -> Way:
            # With ``full``, round -1 fills the store and has nothing to remove.
            stale = f"{number - 1}." if self._full and number >= 0 else None
            root = place(f"client-{kind.__name__}", number)
            return kind(work, root, start=f"{number}.", stale=stale)

        made: dict[str, Callable[[int], Way]] = {"kvtier": engine}
        if not self._full:
            made["kvtier, no digests"] = partial(engine, name="undigested", verify=False)
        if not self._full and batch_io is not None:
            made["compiled part"] = lambda number: CompiledWay(work, place("compiled", number))
        if vllm_io is not None:
            made["vllm.fs_io_C"] = lambda number: files(VLLMFiles, number)
        return {**made, "preadv/pwritev": lambda number: files(PlainFiles, number)}
