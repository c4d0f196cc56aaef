"""The file tier's best possible speed: only its compiled part runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvtier_file.compiled import DONE, batch_io

#: The name of a chunk, its header and its payload.
Chunk: TypeAlias = tuple[str, memoryview, memoryview]

_SHARD, _USED_NS, _LIFETIME = "00", 100, (2**62, 0, 0)


@dataclass
class _Store:
    header: memoryview
    payload: memoryview

    def seal(self, digest: bytes) -> None:
        """Leave the header as it is."""


class CompiledFiles:
    """Stores and loads batches of files in one directory, from any thread."""

    def __init__(self, root: Path, *, direct: bool) -> None:
        for place in (root, root / "tmp", root / _SHARD):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = os.open(root, os.O_RDONLY)
        self._temporaries = os.open(root / "tmp", os.O_RDONLY)
        self._flags = os.O_DIRECT if direct else 0

    def close(self) -> None:
        os.close(self._root)
        os.close(self._temporaries)

    def store(self, chunks: Sequence[Chunk]) -> None:
        digest_bytes = len(chunks[0][2])
        files = tuple((name, False, _Store(*buffers), _USED_NS) for name, *buffers in chunks)
        _check(batch_io.write(self._temporaries, digest_bytes, self._flags, files))
        names = tuple((name, _SHARD, name) for name, *_ in chunks)
        _check(batch_io.place(self._temporaries, self._root, False, names))

    def load(self, chunks: Sequence[Chunk]) -> None:
        digest_bytes = len(chunks[0][2])
        files = tuple((_SHARD, *chunk, _USED_NS) for chunk in chunks)
        _check(batch_io.read(self._root, digest_bytes, self._flags, False, _LIFETIME, files)[0])


def _check(outcomes: bytes) -> None:
    if set(outcomes) != {DONE}:
        raise SystemExit("a file could not be moved")
