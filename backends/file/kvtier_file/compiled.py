"""Loads the tier's compiled part, which is optional."""

from __future__ import annotations

import atexit
import sys
from types import ModuleType

import xxhash

__all__ = ["ABSENT", "DONE", "NOT_DONE", "batch_io", "split"]

try:
    from kvtier_file import _batch_io as batch_io
except ImportError:
    batch_io = None  # type: ignore[assignment]

#: The outcomes for a chunk of a batch; see ``_batch_io.pyi``.
NOT_DONE, DONE, ABSENT = range(3)


def find_digests(part: ModuleType) -> bool:
    """Let a compiled part compute digests with libxxhash; return false if no library works."""
    # The compiled part digests this in three pieces: two whole pieces and a short one.
    sample = bytes(range(256)) * 2049
    # xxhash's extension contains a copy of libxxhash, but may hide the copy's functions. So try the
    # system's library too.
    extension = sys.modules.get(xxhash.xxh3_128_digest.__module__)
    expected = xxhash.xxh3_128_digest(sample)
    for library in (str(getattr(extension, "__file__", None)), "libxxhash.so.0"):
        if part.use_digests(library) and part.digest(sample) == expected:
            return True
    part.use_digests("/")  # clear the function, because no library gave the right digest
    return False


if batch_io is not None:
    find_digests(batch_io)
    # A thread that asks for the interpreter lock while the interpreter ends can crash the process.
    atexit.register(batch_io.stop_sealing)


def split(digests: bytes, count: int) -> list[bytes | None]:
    """Split joined digests; return ``None`` for each chunk without a digest."""
    return [digests[at : at + 16] or None for at in range(0, count * 16, 16)]
