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
    :meth:`TierClient.close`. A method may hand the client new jobs, and must not raise.
    """

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a lookup (``job``) in ``tier``, one per key.

        ``OK`` means present and ``NOT_FOUND`` absent; any other verdict is a failed lookup.
        """

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a load (``job``) from ``tier``, one per key.

        Slots with the verdict ``OK`` hold verified chunks. The others may be written until
        :meth:`released`.
        """

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a store (``job``) into ``tier``, one per key.

        The slots may be read until :meth:`released`.
        """

    def deleted(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Handle the ``verdicts`` of a deletion (``job``) in ``tier``, one per key."""

    def removed(self, tier: TierClient, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        """Handle the tier's report that chunks have left it.

        Args:
            tier: the client.
            keys: the chunks.
            evicted: true if they made room for others, false if they expired, were deleted or lost.
        """

    def released(self, tier: TierClient, job: Job) -> None:
        """Handle the end of the I/O of a ``job`` of ``tier``: its slots are no longer touched.

        It follows the job's conclusion. Jobs that :meth:`TierClient.withdraw` takes back are
        released without one.
        """
