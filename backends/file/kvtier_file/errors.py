"""Translates the operating system's errors into the SDK's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier_file.directories import UntrustedDirectoryError
from kvtier_sdk import (
    ChunkError,
    ConfigError,
    KVTierError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierUnavailableError,
)

#: Error numbers for a foreign file where a directory or a chunk should be.
FOREIGN = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})
#: Error numbers for an absent chunk.
ABSENT = FOREIGN | {errno.ENOENT, errno.ENAMETOOLONG}
#: Error numbers for a file system that accepts no more data.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

#: Error numbers of faults in one chunk's file, such as permissions, bad sectors or a foreign file.
FAULTS = FOREIGN | {
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EREMOTEIO,
    errno.ENODATA,
    errno.EBADMSG,
    errno.EUCLEAN,
}

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def absence_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in ABSENT:
            raise


def tier_error(error: OSError, root: Path, ability: str) -> TierError:
    if isinstance(error, UntrustedDirectoryError):
        return TierAuthError(str(error.strerror))
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in FULL:
        return TierCapacityError(f"tier root '{root}' is full: {reason}")
    if error.errno in _REFUSED:
        return TierAuthError(f"tier root '{root}' is not {ability}: {reason}")
    if error.errno in FOREIGN:
        return TierError(
            f"tier root '{root}' has a foreign file in a chunk's or directory's place: {reason}"
        )
    if error.errno == errno.ENAMETOOLONG:
        return TierError(f"the key is too long for a file name in tier root '{root}': {reason}")
    return TierUnavailableError(f"tier root '{root}': {reason}")


def chunk_error(error: OSError, root: Path, ability: str) -> ChunkError:
    """Return the ``ChunkError`` for an error whose number is in :data:`FAULTS`."""
    is_untrusted = isinstance(error, UntrustedDirectoryError)
    if is_untrusted or error.errno in FOREIGN or error.errno == errno.ENAMETOOLONG:
        return ChunkError(str(tier_error(error, root, ability)))
    reason = os.strerror(error.errno or 0)
    return ChunkError(f"tier root '{root}' has a chunk whose file is not {ability}: {reason}")


def open_error(error: OSError, root: Path) -> KVTierError:
    if isinstance(error, UntrustedDirectoryError):
        return ConfigError(str(error.strerror))
    if error.errno in _REFUSED | ABSENT | {errno.EEXIST}:
        return ConfigError(
            f"tier root '{root}' is not writable: {os.strerror(error.errno)}; choose another "
            "root, or let this user write there"
        )
    return tier_error(error, root, "writable")
