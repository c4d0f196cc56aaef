"""The chunks that a tier is known to have."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.types import OffloadKey

_PLACES = 2**17  # the most chunks to remember per tier; at 8 bytes each, the table takes 1 MiB

_OK: Final = Verdict.OK
_NOT_FOUND: Final = Verdict.NOT_FOUND
_TIMEOUT: Final = Verdict.TIMEOUT


class KnownChunks:
    """A fixed-size table of hashed keys, in which a newer hash may replace an older one.

    If two keys have the same hash, a chunk can wrongly count as known. Its load then fails.
    """

    def __init__(self) -> None:
        self._hashes: array[int] | None = None
        self._newest_purged = 0

    def __contains__(self, key: OffloadKey) -> bool:
        if self._hashes is None:
            return False
        hashed = hash(key)
        return self._hashes[hashed % _PLACES] == hashed

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        if self._hashes is not None:
            for key in keys:
                hashed = hash(key)
                if self._hashes[hashed % _PLACES] == hashed:
                    self._hashes[hashed % _PLACES] = 0

    def clear(self) -> None:
        self._hashes = None

    def purge(self, newest_job: int) -> None:
        """Forget all chunks, and ignore the results of jobs up to ``newest_job``."""
        self._newest_purged = newest_job
        self.clear()

    def found(self, job: Job, keys: Iterable[OffloadKey]) -> None:
        if job.job_id <= self._newest_purged:
            return
        if self._hashes is None:
            self._hashes = array("q", bytes(8 * _PLACES))
        for key in keys:
            hashed = hash(key)
            self._hashes[hashed % _PLACES] = hashed

    def loaded(self, job: Job, verdicts: Sequence[Verdict], present: Iterable[OffloadKey]) -> None:
        """Apply a load's verdicts. The tier removed the chunks that are not ``present``."""
        if _NOT_FOUND in verdicts or _TIMEOUT in verdicts:
            # Forget all chunks, so that lookups precede loads again. If one chunk is lost, others
            # may be lost too. After a timeout the tier may hang, which a lookup detects sooner.
            self.clear()
        elif verdicts.count(_OK) == len(verdicts):
            self.found(job, present)
        else:
            self.discard(k for k, v in zip(job.keys, verdicts, strict=True) if v is not _OK)
