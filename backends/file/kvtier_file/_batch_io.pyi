"""The tier's compiled part. Each call handles a batch of files. Only ``write``
needs the interpreter lock meanwhile, to seal each header.

A file's outcome is a byte: 0 for not done, 1 for done. ``touch`` also returns 2, if the file is
missing but its directory, the shard, exists. After a 0 the chunk's file is unchanged, and the
caller repeats the work in Python to find the reason. With ``strict``, the outcome is 0 for each
file in a shard that other users could change.
``namespace_fd`` and ``temporaries_fd`` are descriptors of directories, ``direct`` is
``os.O_DIRECT`` or 0, ``used_ns`` is a time of use in nanoseconds since the epoch, and ``lifetime``
is a :class:`~kvtier_file.chunks.Lifetime`.
"""

from kvtier_sdk import Transfer

def use_digests(library: str, /) -> bool:
    """Load xxh3-128 from a shared library; return false if the library lacks the function."""

def digest(payload: bytes, /) -> bytes:
    """Return a payload's digest. Raise ``ValueError`` if no library is loaded."""

def stop_sealing() -> None:
    """Leave all later stores with digests undone. Wait for running calls of ``Transfer.seal``."""

def read(
    namespace_fd: int,
    digest_bytes: int,
    direct: int,
    strict: bool,
    lifetime: tuple[int, int, int],
    files: tuple[tuple[str, str, memoryview, memoryview, int], ...],
    /,
) -> tuple[bytes, bytes, bytes]:
    """Fill buffers from files that have not expired, and record a use of each file.

    The tuple of a file has its shard, name, writable header, writable payload and ``used_ns``.
    A file may be shorter than its buffers. Return the outcomes, the files' lengths and the joined
    digests. A length is a native 64-bit integer, and is valid only if the file's outcome is 1. If
    ``digest_bytes`` is 0, there are no digests.
    """

def write(
    temporaries_fd: int,
    digest_bytes: int,
    direct: int,
    files: tuple[tuple[str, bool, Transfer, int], ...],
    /,
) -> bytes:
    """Write new files, or overwrite spares of any length; remove unusable spares.

    A spare is the file of an evicted chunk. The tuple of a file has its name, a flag that is true
    for a spare, its transfer and ``used_ns``. The transfer's header is sealed with the digest of
    the payload's first ``digest_bytes`` bytes; without a library, the transfer makes the digest.
    """

def place(
    temporaries_fd: int,
    namespace_fd: int,
    strict: bool,
    files: tuple[tuple[str, str, str], ...],
    /,
) -> bytes:
    """Give temporary files their final names, replacing existing files.

    The tuple of a file has its temporary name, its shard and its final name in the shard.
    """

def touch(
    namespace_fd: int,
    lengths: tuple[int, int],
    strict: bool,
    lifetime: tuple[int, int, int],
    files: tuple[tuple[str, str, int], ...],
    /,
) -> bytes:
    """Look for files that have not expired, and record a use of each.

    ``lengths`` are the least and the greatest length of a file. The tuple of a file has its shard,
    name and ``used_ns``. If ``used_ns`` is -1, record no use.
    """
