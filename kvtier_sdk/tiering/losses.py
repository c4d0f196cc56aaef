"""Records why chunks are missing from a tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeAlias

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.runner.jobs import Job, Operation, Verdict
from kvtier_sdk.types import OffloadKey

#: The size of a generation of losses. Two generations take at most 10 MiB.
_MOST_LOSSES = 2**15
#: The reason reported for an unknown loss, with the time at which the record begins.
NO_RECORD: Final = "no_record_since"

Loss: TypeAlias = tuple[str, float]  # the reason and the wall-clock time


class Losses:
    """One tier's latest losses of chunks, by hashed key. Any thread may call :meth:`find`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turned_s = clock.wall_s()
        self._unknown = NO_RECORD, self._turned_s
        # Two generations, because a dictionary cannot drop its oldest entries quickly.
        self._recent: dict[int, Loss] = {}
        self._older: dict[int, Loss] = {}

    def find(self, key: OffloadKey) -> Loss:
        hashed = hash(key)
        return self._recent.get(hashed) or self._older.get(hashed) or self._unknown

    def note(self, keys: Iterable[OffloadKey], reason: str) -> None:
        now_s = self._clock.wall_s()
        self._recent.update(dict.fromkeys(map(hash, keys), (reason, now_s)))
        if len(self._recent) >= _MOST_LOSSES:
            self._older, self._recent = self._recent, {}
            self._unknown, self._turned_s = (NO_RECORD, self._turned_s), now_s

    def failed(
        self, job: Job, verdicts: Sequence[Verdict], unreported: Collection[OffloadKey]
    ) -> None:
        """Record lost chunks. A missing chunk counts only if its removal was ``unreported``."""
        for key, verdict in zip(job.keys, verdicts, strict=True):
            is_unstored = job.operation is Operation.STORE and verdict is not Verdict.OK
            is_missing = verdict is Verdict.NOT_FOUND and key in unreported
            if is_unstored or is_missing or verdict is Verdict.CORRUPT:
                self.note([key], f"{job.operation.value}.{verdict.value}")
