"""Writes sample stores, which later versions must be able to read.

    PYTHONPATH=tests python -m support.old_store tests/integration/stores/0.1.0.tar.xz

Never replace the archive of a released version.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier_sdk import Namespace, OffloadKey
from support.filled import fill, floats, keys_from
from support.keys import OURS, write_keys
from support.live import content

NAMESPACE = Namespace({"model": "meta-llama/Llama-3.1-8B", "dtype": "bfloat16"})
KEYS = keys_from(1, 2)
#: Long enough for a compressed chunk to be at least one page shorter.
CHUNK_BYTES = 16384


def repeated_floats(key: OffloadKey, chunk_bytes: int) -> bytes:
    """Return a repetitive chunk, because the archive should stay small."""
    return floats(key, 1024) * (chunk_bytes // 1024)


@dataclass(frozen=True)
class OldStore:
    name: str
    content: Callable[[OffloadKey, int], bytes]
    options: str = ""
    sealed: bool = False

    def url(self, folder: Path, options: str = "") -> str:
        """Return the URL of the store in ``folder``; write a key file if the store needs it."""
        found = f"file://{folder / self.name}?min_free=0{self.options}{options}"
        if self.sealed:
            keys = folder / "chunk.keys"
            codec = f"aes-gcm:{keys}" if keys.exists() else write_keys(keys, OURS)
            found += f"&codec={codec}"
        return found


STORES = (
    OldStore("plain", content),
    OldStore("sealed", content, sealed=True),
    OldStore("compressed", repeated_floats, "&compress=always"),
    OldStore("both", repeated_floats, "&compress=always", sealed=True),
)


def main() -> None:
    (archive,) = map(Path, sys.argv[1:])
    archive.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "x:xz") as file:
        for store in STORES:
            fill(store.url(Path(folder)), NAMESPACE, KEYS, store.content, CHUNK_BYTES)
            file.add(Path(folder, store.name), store.name, filter=_as_of_anyone)


def _as_of_anyone(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
