"""A chunk's name under a root, and a stored chunk with its size and last use."""

from __future__ import annotations

from typing import NamedTuple

from kvtier_sdk import OffloadKey

#: Times of use are below this. It is in 2116; a later one is nonsense, and would leave no room for
#: times after it.
MAX_USED_NS = 2**62


class ChunkId(NamedTuple):
    """The name of a chunk among all namespaces of a root.

    Attributes:
        fingerprint: of its namespace.
        key: of the chunk in that namespace.
    """

    fingerprint: str
    key: OffloadKey


class StoredChunk(NamedTuple):
    """A chunk on disk.

    Attributes:
        chunk_id: its name.
        size_bytes: length of its file.
        used_ns: the last known use, in nanoseconds since the epoch. Another process may have used
            the chunk since.
    """

    chunk_id: ChunkId
    size_bytes: int
    used_ns: int
