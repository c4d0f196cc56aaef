"""Lookups that await the tiers' answers, and the answers so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.tiering.outputs import MissReason
from kvtier_sdk.types import OffloadKey, RequestContext

#: The most chunks that are looked up at once, in some 15 ms of a step. Requests further back in the
#: queue would wait for device blocks anyway, and their answers would be stale by then.
MOST_CHUNKS: Final = 16_384

_OK: Final = Verdict.OK
_NOT_FOUND: Final = Verdict.NOT_FOUND
#: Miss reasons by verdict, if a tier gave no answer; other verdicts count as failed lookups.
_DOUBTS = {
    Verdict.TIMEOUT: MissReason.TIMEOUT.value,
    Verdict.UNAVAILABLE: MissReason.UNAVAILABLE.value,
}


class PendingLookup:
    """The chunks that one request looked up in one step, and the tiers' answers so far.

    Tiers are bits of a mask. Other requests that look up one of these chunks meanwhile share the
    pending lookup. Each tier's lookup job carries it as its tag, so a late answer reaches the
    lookup that it belongs to and never a later one.

    Attributes:
        keys: the chunks.
        request: the request that needs them.
        waiting: tiers that have not answered.
        step: the step in which it began.
        hits: by chunk, the tiers that have it and have not failed to load it: 0 if all of them
            have failed, no entry if no tier has it.
        deadline_s: clock time from which the missing answers of tiers count as misses; infinite
            until the tiers are asked.
        doubt: why a miss may be wrong: a tier could not be asked, or did not answer. The miss is
            counted under this reason.
        skipped: tiers that may have the chunks and could not be asked.
        sealed: true once it was handed over: no more keys are added.
        shared: true if the request may ask all tiers, so that other requests may use the answers.
        worth_loading: true if loading is faster than recomputing; ``None`` until decided.
        is_known: true if no tier is asked, because the tiers in ``hits`` are known to have the
            chunks. If they fail to load a chunk, the tiers are asked for it.
    """

    __slots__ = (
        "deadline_s",
        "doubt",
        "hits",
        "is_known",
        "keys",
        "request",
        "sealed",
        "shared",
        "skipped",
        "step",
        "waiting",
        "worth_loading",
    )

    def __init__(self, request: RequestContext, waiting: int, step: int, *, shared: bool) -> None:
        self.keys: list[OffloadKey] = []
        self.request = request
        self.waiting = waiting
        self.step = step
        self.hits: dict[OffloadKey, int] = {}
        self.deadline_s = math.inf
        self.doubt: str | None = None
        self.skipped = 0
        self.sealed = False
        self.shared = shared
        self.worth_loading: bool | None = None
        self.is_known = False

    def first_hit(self, key: OffloadKey, tiers: int) -> int:
        """Return the index of the first of these tiers that has the chunk; there must be one."""
        mask = self.hits[key] & tiers
        return (mask & -mask).bit_length() - 1

    def run_from(self, key: OffloadKey, tier: int, limit: int) -> list[OffloadKey]:
        """Return the consecutive chunks from ``key`` on that ``tier`` is the first to have."""
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
        """Remove a tier from the hits of a chunk that it cannot load after all."""
        self.hits[key] &= ~(1 << tier)


class LookupTable:
    """The pending lookups, and the limit on chunks that are looked up at once.

    Attributes:
        open: the pending lookup of each chunk, for others to share.
        waiting_chunks: number of chunks for which an answer is missing.
        limit: number of chunks after which no further request begins its lookups.
    """

    def __init__(self) -> None:
        self.open: dict[OffloadKey, PendingLookup] = {}
        self.waiting_chunks = 0
        self.limit = MOST_CHUNKS
        # Chunks that this step looked up without asking a tier, which takes time too.
        self._joined = 0
        self._new: list[PendingLookup] = []

    @property
    def is_full(self) -> bool:
        """True if no further request may begin its lookups in this step."""
        return self.waiting_chunks + self._joined >= self.limit

    def begin(
        self, request: RequestContext, tiers: int, step: int, *, shared: bool
    ) -> PendingLookup:
        """Begin a lookup, to be handed over at the end of the step."""
        pending = PendingLookup(request, tiers, step, shared=shared)
        self._new.append(pending)
        return pending

    def add(self, pending: PendingLookup, key: OffloadKey) -> None:
        """Add a chunk to a lookup that is not yet handed over."""
        pending.keys.append(key)
        if not pending.waiting:
            self._joined += 1
            return
        self.waiting_chunks += 1
        if pending.shared:
            self.open[key] = pending

    def join(self, key: OffloadKey) -> PendingLookup | None:
        """Return the pending lookup of a chunk, to share its answers; ``None`` if there is none."""
        pending = self.open.get(key)
        if pending is not None:
            self._joined += 1
        return pending

    def step_ended(self) -> None:
        """Reset the count of joined chunks for the next step."""
        self._joined = 0

    def take_new(self) -> list[PendingLookup]:
        """Return the lookups that began since the last call, and seal them.

        In some of them no tier is asked, because the chunks are known to be in a tier.
        """
        taken, self._new = self._new, []
        for pending in taken:
            pending.sealed = True
        return taken

    def answered(self, pending: PendingLookup, bit: int, verdicts: Sequence[Verdict]) -> None:
        """Apply a tier's answers, unless the lookup was given up before."""
        if not pending.waiting & bit:
            return
        hits = pending.hits
        for key, verdict in zip(pending.keys, verdicts, strict=True):
            if verdict is _OK:
                hits[key] = hits.get(key, 0) | bit
            elif verdict is not _NOT_FOUND:
                pending.doubt = _DOUBTS.get(verdict, MissReason.LOOKUP_FAILED.value)
        pending.waiting &= ~bit
        if not pending.waiting:
            self._close(pending)

    def give_up(self, pending: PendingLookup) -> None:
        """Stop waiting for the tiers that have not answered."""
        pending.waiting = 0
        pending.doubt = MissReason.TIMEOUT.value
        self._close(pending)

    def forget(self) -> None:
        """Drop every lookup: answers under way no longer concern any request."""
        self.open.clear()
        for pending in self._new:
            if pending.waiting:
                self.waiting_chunks -= len(pending.keys)
        self._new.clear()

    def _close(self, pending: PendingLookup) -> None:
        self.waiting_chunks -= len(pending.keys)
        for key in pending.keys:
            # The table may hold another lookup of the key, if this one is not shared.
            if self.open.get(key) is pending:
                del self.open[key]
