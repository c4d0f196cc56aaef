"""The callbacks from a tier's client to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.types import OffloadKey

if TYPE_CHECKING:
    from kvtier_sdk.tiering.tier_client import TierClient


class TierListener:
    """Callbacks for the outcome of a tier's jobs. Override those you need; the rest do nothing.

    Every method is called on the engine's thread, inside :meth:`TierClient.poll` or
    :meth:`TierClient.close`. A method may hand the client new jobs, and must not raise. The
    verdicts are one per key of the job.
    """

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle a lookup: ``OK`` is present, ``NOT_FOUND`` absent, any other verdict a failure."""

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the conclusion of a load. Slots with the verdict ``OK`` hold verified chunks.

        The other slots may still be written until :meth:`released`.
        """

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the conclusion of a store. Its slots may be read until :meth:`released`."""

    def deleted(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the conclusion of a deletion."""

    def removed(self, tier: TierClient, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        """Handle the tier's report that chunks have left it.

        Args:
            tier: the client.
            keys: the chunks.
            evicted: true if they made room for others, false if they expired, were deleted or lost.
        """

    def released(self, tier: TierClient, job: Job) -> None:
        """Handle the end of a job's I/O, after its conclusion: its slots are no longer touched.

        Jobs that :meth:`TierClient.withdraw` takes back are released too, without a conclusion.
        """
