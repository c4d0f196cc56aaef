"""Questions to the tiers: who has these chunks?"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.types import OffloadKey, RequestContext

_OK, _NOT_FOUND = Verdict.OK, Verdict.NOT_FOUND


class PendingLookup:
    """The chunks that one request asked for in one step, and what the tiers have answered so far.

    Tiers are bits of a mask. Others who ask for one of these chunks meanwhile share the question.

    Attributes:
        keys: the chunks.
        request: on whose behalf.
        waiting: tiers that have not answered.
        hits: tiers that have a chunk and have not failed to bring it; 0 where all that had it
            have failed, absent where none had it.
        deadline_s: when the tiers that have not answered are taken not to have the chunks.
        doubt: why an answer may be wrong: a tier that could not be asked or did not answer. The
            reason that a miss is counted under.
        sealed: whether it has been handed over: no key is added any more.
        shared: whether all tiers may be asked for the request: its answers are everybody's.
        worth_loading: whether loading is faster than recomputing; ``None`` until it was weighed.
    """

    __slots__ = (
        "deadline_s",
        "doubt",
        "hits",
        "keys",
        "request",
        "sealed",
        "shared",
        "waiting",
        "worth_loading",
    )

    def __init__(
        self, request: RequestContext, waiting: int, deadline_s: float, *, shared: bool
    ) -> None:
        self.keys: list[OffloadKey] = []
        self.request = request
        self.waiting = waiting
        self.hits: dict[OffloadKey, int] = {}
        self.deadline_s = deadline_s
        self.doubt: str | None = None
        self.sealed = False
        self.shared = shared
        self.worth_loading: bool | None = None

    def best_hit(self, key: OffloadKey, tiers: int) -> int:
        """Index of the first of these tiers that has the chunk; only where there is one."""
        mask = self.hits[key] & tiers
        return (mask & -mask).bit_length() - 1

    def found_from(self, key: OffloadKey, tier: int, limit: int) -> list[OffloadKey]:
        """The chunks from one on that a tier is the first to have, to the first that it is not.

        Args:
            key: the first of them.
            tier: index of the tier.
            limit: how many to return at most, at least 1.

        Returns:
            A run of the question's chunks.
        """
        hits, bit = self.hits, 1 << tier
        before = bit - 1
        start = self.keys.index(key)
        run = []
        for found in self.keys[start : start + limit]:
            mask = hits.get(found, 0)
            if not mask & bit or mask & before:
                break
            run.append(found)
        return run

    def strike(self, key: OffloadKey, tier: int) -> None:
        """A tier has failed to bring a chunk that it said it had: do not ask it again."""
        self.hits[key] &= ~(1 << tier)


class LookupTable:
    """The open questions, and which job carries the answers to which.

    A late answer reaches the question that it belongs to and nothing else, so it is never taken
    for the answer to a later one.

    Attributes:
        open: the open question of each chunk that is asked for.
    """

    def __init__(self) -> None:
        self.open: dict[OffloadKey, PendingLookup] = {}
        self._new: list[PendingLookup] = []
        self._by_job: dict[int, PendingLookup] = {}

    def begin(
        self, request: RequestContext, tiers: int, deadline_s: float, *, shared: bool
    ) -> PendingLookup:
        """Begin a question, to be handed over at the end of the step.

        Args:
            request: on whose behalf.
            tiers: mask of the tiers that are asked.
            deadline_s: of the answers.
            shared: whether all tiers may be asked for the request.

        Returns:
            The question, still without keys.
        """
        question = PendingLookup(request, tiers, deadline_s, shared=shared)
        self._new.append(question)
        return question

    def take_new(self) -> list[PendingLookup]:
        """Take the questions that no tier has been asked yet."""
        taken, self._new = self._new, []
        for question in taken:
            question.sealed = True
        return taken

    def handed_over(self, job_id: int, question: PendingLookup) -> None:
        """Remember which question a lookup job answers."""
        self._by_job[job_id] = question

    def answered(self, job_id: int, bit: int, verdicts: Sequence[Verdict]) -> None:
        """Take a tier's answers.

        Args:
            job_id: of the lookup job.
            bit: the tier's.
            verdicts: one a key; anything but ``OK`` means that the tier does not have it.
        """
        question = self._by_job.pop(job_id, None)
        if question is None or not question.waiting & bit:
            return
        hits = question.hits
        for key, verdict in zip(question.keys, verdicts, strict=True):
            if verdict is _OK:
                hits[key] = hits.get(key, 0) | bit
            elif verdict is not _NOT_FOUND:
                question.doubt = verdict.value
        question.waiting &= ~bit
        if not question.waiting:
            self._close(question)

    def give_up(self, question: PendingLookup) -> None:
        """Wait no longer for the tiers that have not answered."""
        question.waiting = 0
        question.doubt = Verdict.TIMEOUT.value
        self._close(question)

    def forget(self) -> None:
        """Drop every question: answers that are under way belong to nobody."""
        self.open.clear()
        self._new.clear()
        self._by_job.clear()

    def _close(self, question: PendingLookup) -> None:
        for key in question.keys:
            # That of a request which may not ask all tiers is never open to others.
            if self.open.get(key) is question:
                del self.open[key]
