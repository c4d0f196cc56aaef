"""Questions to the tiers: does anybody have this chunk?"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.jobs import Job, Verdict
from kvtier_sdk.types import OffloadKey


class Probe:
    """One question to all tiers, and what they have answered so far. Tiers are bits of a mask.

    Attributes:
        key: the chunk.
        waiting: tiers that have not answered.
        hits: tiers that have the chunk and have not failed to bring it.
        deadline_s: when the tiers that have not answered are taken not to have it.
    """

    __slots__ = ("deadline_s", "hits", "key", "waiting")

    def __init__(self, key: OffloadKey, waiting: int, deadline_s: float) -> None:
        self.key = key
        self.waiting = waiting
        self.hits = 0
        self.deadline_s = deadline_s

    @property
    def best_hit(self) -> int:
        """Index of the first tier that has the chunk; only where there is one."""
        return (self.hits & -self.hits).bit_length() - 1


class ProbeBook:
    """The open probes, and which job carries the answers to which.

    Whoever asks for a key while its probe is open shares it. A late answer reaches the probe it
    belongs to and nothing else, so it is never taken for the answer to a later question.
    """

    def __init__(self) -> None:
        self._open: dict[OffloadKey, Probe] = {}
        self._asked: dict[int, list[Probe | None]] = {}

    def find(self, key: OffloadKey) -> Probe | None:
        """The open probe of a key."""
        return self._open.get(key)

    def open(self, key: OffloadKey, tiers: int, deadline_s: float) -> Probe:
        """Begin a question.

        Args:
            key: the chunk.
            tiers: mask of the tiers that are asked.
            deadline_s: of the answer.

        Returns:
            The new probe.
        """
        probe = self._open[key] = Probe(key, tiers, deadline_s)
        return probe

    def handed_over(self, job: Job) -> None:
        """Remember which probes a lookup job answers."""
        self._asked[job.job_id] = [self._open.get(key) for key in job.keys]

    def answered(self, job: Job, bit: int, verdicts: Sequence[Verdict]) -> None:
        """Take a tier's answers.

        Args:
            job: the lookup job.
            bit: the tier's.
            verdicts: one a key; anything but ``OK`` means that the tier does not have it.
        """
        there = Verdict.OK
        for probe, verdict in zip(self._asked.pop(job.job_id), verdicts, strict=True):
            if probe is None or not probe.waiting & bit:
                continue
            probe.waiting &= ~bit
            if verdict is there:
                probe.hits |= bit
            if not probe.waiting:
                self._close(probe)

    def give_up(self, probe: Probe) -> None:
        """Wait no longer for the tiers that have not answered."""
        probe.waiting = 0
        self._close(probe)

    def _close(self, probe: Probe) -> None:
        if self._open.get(probe.key) is probe:
            del self._open[probe.key]
