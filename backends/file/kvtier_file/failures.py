"""What an operating system's error means to the SDK."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier_sdk import (
    ConfigError,
    KVTierError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierUnavailableError,
)

#: Something else is where a directory or a chunk of ours should be.
FOREIGN = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})
#: No chunk of ours is behind such a name.
ABSENT = FOREIGN | {errno.ENOENT, errno.ENAMETOOLONG}
#: There is no room.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def tier_error(error: OSError, root: Path, ability: str) -> TierError:
    """The error to report for one that the operating system raised in mid-work.

    Args:
        error: what was raised.
        root: the tier's root.
        ability: what the root lacks, if it is refused: ``"readable"`` or ``"writable"``.

    Returns:
        An error whose message names the root and the reason.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in FULL:
        return TierCapacityError(f"tier root '{root}' is full: {reason}")
    if error.errno in _REFUSED:
        return TierAuthError(f"tier root '{root}' is not {ability}: {reason}")
    if error.errno in FOREIGN:
        return TierError(f"tier root '{root}' holds a foreign file in our place: {reason}")
    if error.errno == errno.ENAMETOOLONG:
        return TierError(f"the key is too long for a name in tier root '{root}': {reason}")
    return TierUnavailableError(f"tier root '{root}': {reason}")


def open_error(error: OSError, root: Path) -> KVTierError:
    """The error to report for one that the operating system raised while the tier was opened.

    Args:
        error: what was raised.
        root: the tier's root.

    Returns:
        A :class:`ConfigError` where another root would help, else as :func:`tier_error`.
    """
    if error.errno in _REFUSED | ABSENT | {errno.EEXIST}:
        return ConfigError(
            f"tier root '{root}' is not writable: {os.strerror(error.errno)}; choose another "
            "root, or let this user write there"
        )
    return tier_error(error, root, "writable")
