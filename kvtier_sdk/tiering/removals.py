"""Chunks that left a tier while stores or loads were under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.tiering.job_table import JobTable
from kvtier_sdk.types import OffloadKey

_MOVES = (Operation.STORE, Operation.LOAD)


class RecentRemovals:
    """Removals, remembered for the stores and loads that were under way when they were reported.

    If a chunk was removed before its job was concluded, either may have come first, so the chunk
    counts as removed. Job ids grow, so a higher id shows that a job was handed over after the
    removal.
    """

    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs
        # By chunk: the newest job that was under way at its removal. The latest removal is last.
        self._newest: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered chunks."""
        return len(self._newest)

    def note(self, keys: Iterable[OffloadKey]) -> None:
        """Remember chunks that have left, if a store or a load is under way."""
        if self._jobs.oldest(_MOVES) is None:
            return
        job_id = self._jobs.newest
        for key in keys:
            self._newest[key] = job_id
            self._newest.move_to_end(key)

    def without(self, job: Job, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return ``keys`` without the chunks that have left since the job's hand-over."""
        newest = self._newest
        if not newest:
            return keys
        kept = [key for key in keys if newest.get(key, 0) < job.job_id]
        # Forget the chunks that left before every job that is still under way.
        oldest = self._jobs.oldest(_MOVES)
        while newest and (oldest is None or next(iter(newest.values())) < oldest):
            newest.popitem(last=False)
        return kept
