"""The effect of a tier's reports on the manager's tables."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.runner.jobs import Job, Operation, Verdict
from kvtier_sdk.tiering.cascade import Cascade
from kvtier_sdk.tiering.lookups import LookupTable
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.types import OffloadKey


class TierReports(TierListener):
    """Applies verdicts, and releases the pins of a job whose I/O has ended."""

    def __init__(
        self,
        bit: int,
        primary: PrimaryTier,
        lookups: LookupTable,
        promotions: Promotions,
        cascade: Cascade,
    ) -> None:
        self._bit = bit
        self._primary = primary
        self._lookups = lookups
        self._promotions = promotions
        self._cascade = cascade

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._lookups.answered(job.tag, self._bit, verdicts)

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        landed = self._promotions.concluded(job, verdicts)
        if landed:
            self._primary.publish(landed, job.request)
            self._cascade.landed(landed)

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._cascade.settled(self._bit, job, verdicts)

    def removed(self, tier: TierClient, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        self._promotions.removed(self._bit.bit_length() - 1, keys)
        self._cascade.removed(self._bit, keys, evicted=evicted)

    def released(self, tier: TierClient, job: Job) -> None:
        if job.operation is Operation.STORE:
            for index in job.slots:
                self._primary.unpin(self._primary.slots[index])
        elif job.operation is Operation.LOAD:
            self._promotions.released(job)
