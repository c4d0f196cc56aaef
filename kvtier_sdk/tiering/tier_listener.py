"""The side of a tier's client that calls the engine back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.types import OffloadKey

if TYPE_CHECKING:
    from kvtier_sdk.tiering.tier_client import TierClient


class TierListener:
    """Learns what becomes of a tier's jobs. Override what you need; the rest does nothing.

    Every method is called on the engine's thread, inside :meth:`TierClient.poll` or
    :meth:`TierClient.close`. A method may hand the client new jobs, and must not raise.
    """

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """A lookup is concluded.

        Args:
            tier: the client.
            job: the lookup.
            verdicts: one a key. ``OK`` is present, ``NOT_FOUND`` absent; anything else means that
                the tier could not say.
        """

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """A load is concluded. Slots whose verdict is ``OK`` hold their chunk, verified.

        The other slots may still be written until :meth:`released`.

        Args:
            tier: the client.
            job: the load.
            verdicts: one a key.
        """

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """A store is concluded. Its slots may still be read until :meth:`released`.

        Args:
            tier: the client.
            job: the store.
            verdicts: one a key.
        """

    def deleted(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        """A deletion is concluded.

        Args:
            tier: the client.
            job: the deletion.
            verdicts: one a key.
        """

    def removed(self, tier: TierClient, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        """Chunks left the tier, and it reported it.

        Args:
            tier: the client.
            keys: the chunks.
            evicted: true if they made room for others, false if they expired, were deleted or lost.
        """

    def released(self, tier: TierClient, job: Job) -> None:
        """A job's I/O has ended, after its conclusion: the tier no longer touches its slots.

        Jobs that :meth:`TierClient.withdraw` takes back are released too, without a conclusion.

        Args:
            tier: the client.
            job: the job.
        """
