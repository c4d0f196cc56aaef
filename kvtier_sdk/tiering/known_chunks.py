"""Chunks that this process knows to be in a tier."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.types import OffloadKey

#: The most chunks that are remembered, in 8 bytes each: 1 MiB per tier.
_PLACES = 2**17


class KnownChunks:
    """Remembers hashes of keys. A hash determines its place, where a newer one replaces it.

    Two keys with the same hash count as the same chunk. Then a load may find nothing, as it does
    when the tier has lost a chunk without a report.
    """

    def __init__(self) -> None:
        self._hashes: array[int] | None = None
        self._newest_purged = 0

    def __contains__(self, key: OffloadKey) -> bool:
        if self._hashes is None:
            return False
        hashed = hash(key)
        return self._hashes[hashed % _PLACES] == hashed

    def add(self, keys: Iterable[OffloadKey]) -> None:
        if self._hashes is None:
            self._hashes = array("q", bytes(8 * _PLACES))
        for key in keys:
            hashed = hash(key)
            self._hashes[hashed % _PLACES] = hashed

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks; unknown ones are ignored."""
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
        """Remember chunks that a job has stored or loaded, unless it is older than a purge."""
        if job.job_id > self._newest_purged:
            self.add(keys)

    def loaded(self, job: Job, verdicts: Sequence[Verdict], present: Iterable[OffloadKey]) -> None:
        """Learn from the verdicts of a load; ``present`` are the chunks not removed meanwhile."""
        if Verdict.NOT_FOUND in verdicts or Verdict.TIMEOUT in verdicts:
            # One lost chunk suggests others; and lookups detect a hanging tier sooner than loads.
            self.clear()
        elif verdicts.count(Verdict.OK) == len(verdicts):
            self.found(job, present)
        else:
            self.discard(k for k, v in zip(job.keys, verdicts, strict=True) if v is not Verdict.OK)
