"""Translates the negative statuses of Mooncake's client to the SDK's errors."""

from __future__ import annotations

from kvtier_sdk import (
    ChunkNotFoundError,
    CorruptChunkError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)

NOT_FOUND = -704
#: Status of a load if the object is longer than the buffers.
TOO_LONG = -600
#: Status of a load if the object is shorter than the buffers, or its node cannot be reached.
TRANSFER_FAILED = -800
MASTER_LOST = -900

_ERRORS: dict[int, tuple[type[TierError], str]] = {
    -200: (TierCapacityError, "no node has room for it, or there is none"),
    -703: (ChunkNotFoundError, "its store has not ended"),
    NOT_FOUND: (ChunkNotFoundError, "no such chunk"),
    -707: (TierTimeoutError, "it was not read before its lease expired"),
    TRANSFER_FAILED: (TierUnavailableError, "its node cannot be reached"),
    -801: (CorruptChunkError, "the store found it damaged"),
    MASTER_LOST: (TierUnavailableError, "the master cannot be reached"),
    -901: (TierTimeoutError, "the master did not answer in time"),
    -1010: (TierUnavailableError, "the master is not ready"),
}


def error_of(status: int) -> TierError:
    kind, text = _ERRORS.get(status, (TierError, "the client failed"))
    return kind(f"{text} (status {status})")
