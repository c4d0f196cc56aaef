"""Chunks that leave a tier while stores are under way: which of these are not announced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvtier_sdk.runner.jobs import Job, JobTable, Operation
from kvtier_sdk.types import OffloadKey


class RecentRemovals:
    """What has left a tier, remembered only for the stores that were under way then.

    Of a chunk that left before its store was concluded nobody knows which came first. A store that
    was handed over later is beyond doubt: ids of jobs grow, so the id tells.

    Args:
        jobs: of the tier.
    """

    def __init__(self, jobs: JobTable) -> None:
        self._jobs = jobs
        # By chunk: the newest job that was under way when it left; the latest to leave comes last.
        self._newest: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._newest)

    def note(self, keys: Iterable[OffloadKey]) -> None:
        """Chunks have left."""
        if self._jobs.oldest(Operation.STORE) is None:
            return
        job_id = self._jobs.newest
        for key in keys:
            self._newest[key] = job_id
            self._newest.move_to_end(key)

    def without(self, store: Job, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Take a store that has just been concluded.

        Args:
            store: which.
            keys: those of its chunks that were stored.

        Returns:
            Those of them that have not left since it was handed over.
        """
        newest = self._newest
        if not newest:
            return keys
        kept = [key for key in keys if newest.get(key, 0) < store.job_id]
        # No store that is still under way was there when the first of them left.
        oldest = self._jobs.oldest(Operation.STORE)
        while newest and (oldest is None or next(iter(newest.values())) < oldest):
            newest.popitem(last=False)
        return kept
