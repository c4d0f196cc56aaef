"""The tier's compiled part: file operations on a batch in one call, without the interpreter lock.

The functions on files return one byte per file: 0 (not done), 1 (done), or 2 (``touch`` only: the
file is missing, but its shard exists). After a 0 the file is unchanged, and the caller tries again
in Python to find the reason. With ``strict``, a shard that other users could change gives 0.
``namespace_fd`` and ``temporaries_fd`` are descriptors of directories, ``object_bytes`` is the
length of a whole file, ``direct`` is ``os.O_DIRECT`` or 0, ``used_ns`` is in nanoseconds since the
epoch, and ``lifetime`` is a :class:`~kvtier_file.chunks.Lifetime`.
"""

def use_digests(library: str, /) -> bool:
    """Take xxh3-128 from a shared library; return false if the library does not have it."""

def digest(digest_bytes: int, payloads: tuple[memoryview, ...], /) -> bytes:
    """Return the digests of the first ``digest_bytes`` of each payload, 16 bytes each.

    Without a library, the result is empty.
    """

def read(
    namespace_fd: int,
    object_bytes: int,
    digest_bytes: int,
    direct: int,
    strict: bool,
    lifetime: tuple[int, int, int],
    files: tuple[tuple[str, str, memoryview, memoryview, int], ...],
    /,
) -> tuple[bytes, bytes]:
    """Fill buffers from files that have not expired, and record a use of each.

    Each file is given by its shard, name, writable header and payload, and ``used_ns``. The second
    result has the digests, as :func:`digest` returns them; it is empty if ``digest_bytes`` is 0, or
    without a library.
    """

def write(
    temporaries_fd: int,
    direct: int,
    files: tuple[tuple[str, bool, memoryview, memoryview, int], ...],
    /,
) -> bytes:
    """Write new files or overwrite spares. A spare that cannot be overwritten is removed.

    Each file is given by its name, true if it is a spare, its header, payload and ``used_ns``.
    """

def place(
    temporaries_fd: int,
    namespace_fd: int,
    strict: bool,
    files: tuple[tuple[str, str, str], ...],
    /,
) -> bytes:
    """Give temporary files their final names, replacing existing files.

    Each file is given by its temporary name, its shard and its name in the shard.
    """

def touch(
    namespace_fd: int,
    object_bytes: int,
    strict: bool,
    lifetime: tuple[int, int, int],
    files: tuple[tuple[str, str, int], ...],
    /,
) -> bytes:
    """Look for whole files that have not expired, and record a use of each.

    Each file is given by its shard, name and ``used_ns``; -1 records no use.
    """
