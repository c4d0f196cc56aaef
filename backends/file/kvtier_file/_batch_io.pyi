"""The compiled part of the tier: the usual work on the files of a batch, a batch in one call.

Each function returns a byte for each file. 0: it was not done and nothing has changed, because
something is unusual; work on that file alone finds out what. 1: it is done. 2, of ``touch`` alone:
there is no file, and its shard exists. ``direct`` is ``os.O_DIRECT`` or 0, ``used_ns`` is in
nanoseconds since the epoch, ``lifetime`` a :class:`~kvtier_file.chunks.Lifetime`. The interpreter
lock is not held meanwhile.
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
    """Fill buffers from files, and record a use of each.

    Args:
        namespace_fd: the namespace's directory.
        object_bytes: the length of a whole file.
        direct: see above.
        strict: do nothing in a shard that other users could change.
        lifetime: a file that has expired is not read.
        files: for each its shard, name, writable header and payload, and ``used_ns``.
    """

def write(
    temporaries_fd: int,
    direct: int,
    files: tuple[tuple[str, bool, memoryview, memoryview, int], ...],
    /,
) -> bytes:
    """Write new files, and spare ones over. A spare that cannot be written over is removed.

    Args:
        temporaries_fd: their directory.
        direct: see above.
        files: for each its name, true if it is a spare, its header, payload and ``used_ns``.
    """

def place(
    temporaries_fd: int,
    namespace_fd: int,
    strict: bool,
    files: tuple[tuple[str, str, str], ...],
    /,
) -> bytes:
    """Move temporary files to their places, over what is there.

    Args:
        temporaries_fd: their directory.
        namespace_fd: the namespace's directory.
        strict: as for ``read``.
        files: for each the temporary name, the shard and the name in it.
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

    Args:
        namespace_fd: the namespace's directory.
        object_bytes: the length of a whole file.
        strict: as for ``read``.
        lifetime: as for ``read``.
        files: for each its shard, name and ``used_ns``; -1 records no use.
    """
