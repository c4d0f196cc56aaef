"""The tier's compiled part: file operations on a batch in one call, without the interpreter lock.

Each function returns one byte per file: 0 (not done), 1 (done), or 2 (``touch`` only: the file is
missing, but its shard exists). After a 0 the file is unchanged, and the caller handles it alone to
find out why. ``namespace_fd`` and ``temporaries_fd`` are descriptors of directories,
``object_bytes`` is the length of a whole file, ``direct`` is ``os.O_DIRECT`` or 0, ``used_ns`` is
in nanoseconds since the epoch, and ``lifetime`` is a :class:`~kvtier_file.chunks.Lifetime`. With
``strict``, nothing is done in a shard that other users could change.
"""

def read(
    namespace_fd: int,
    object_bytes: int,
    direct: int,
    strict: bool,
    lifetime: tuple[int, int, int],
    files: tuple[tuple[str, str, memoryview, memoryview, int], ...],
    /,
) -> bytes:
    """Fill buffers from files that have not expired, and record a use of each.

    Each file is given by its shard, name, writable header and payload, and ``used_ns``.
    """

def write(
    temporaries_fd: int,
    direct: int,
    files: tuple[tuple[str, bool, memoryview, memoryview, int], ...],
    /,
) -> bytes:
    """Write new files, or overwrite spare files. A spare that cannot be overwritten is removed.

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
