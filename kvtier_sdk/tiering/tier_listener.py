"""The callbacks by which a tier's client reports to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.types import OffloadKey

if TYPE_CHECKING:
    from kvtier_sdk.tiering.tier_client import TierClient


class TierListener:
    """Receives the results of a tier's jobs. Each method does nothing unless overridden.

    The client calls every method on the engine's thread, inside :meth:`TierClient.poll` or
    :meth:`TierClient.close`. A method may hand the client new jobs, and must not raise.
    """

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a lookup (``job``) in ``tier``, one per key.

        ``OK`` means that the tier has the chunk, and ``NOT_FOUND`` that it does not. Any other
        verdict means that the lookup of the chunk failed.
        """

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a load (``job``) from ``tier``, one per key.

        Slots with the verdict ``OK`` hold verified chunks. The tier may still write to the other
        slots until the client calls :meth:`released`.
        """

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a store (``job``) into ``tier``, one per key.

        The tier may still read the slots until the client calls :meth:`released`.
        """

    def deleted(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a deletion (``job``) in ``tier``, one per key."""

    def removed(self, tier: TierClient, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        """Handle the removal of the chunks ``keys`` from ``tier``.

        ``evicted`` is true if the tier evicted the chunks to make room, and false if they expired,
        were deleted or were lost.
        """

    def released(self, tier: TierClient, job: Job) -> None:
        """Handle the end of a ``job``'s I/O in ``tier``. The job's slots may now be reused.

        The client calls this method after the method for the job's verdicts. It calls only this
        method for a job that :meth:`TierClient.withdraw` cancels.
        """
