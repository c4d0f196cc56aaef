"""Lookups that tiers are still to answer, and what they have answered so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.tiering.outputs import MissReason
from kvtier_sdk.types import OffloadKey, RequestContext

#: Chunks that are looked up at once: some 15 ms of the engine's thread in a step. The requests of
#: a longer queue would wait for device blocks anyway, and answers for them would be old by then.
MOST_CHUNKS: Final = 16_384

_OK: Final = Verdict.OK
_NOT_FOUND: Final = Verdict.NOT_FOUND
#: Why a tier that gave no answer may have the chunk; any other verdict is a failed lookup.
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
        request: on whose behalf.
        waiting: tiers that have not answered.
        step: the step in which it began.
        hits: tiers that have a chunk and have not failed to bring it; 0 where all of them have
            failed, absent where no tier has it.
        deadline_s: when tiers that have not answered count as not having the chunks; infinite
            until they are asked.
        doubt: why an answer may be wrong: a tier could not be asked or did not answer. A miss is
            counted under this reason.
        skipped: tiers that may have the chunks and could not be asked.
        sealed: true once it was handed over: no key is added.
        shared: true if all tiers may be asked for the request, so that others may use the answers.
        worth_loading: true if loading is faster than recomputing; ``None`` until it was weighed.
        is_known: true if no tier is asked: those of ``hits`` are known to have the chunks. If they
            fail to bring one, the tiers are asked for it.
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
        """Return the run of chunks from one on for which a tier is the first that has them."""
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
        """Stop asking a tier for a chunk that it said it had and failed to bring."""
        self.hits[key] &= ~(1 << tier)


class LookupTable:
    """The pending lookups, and how many chunks may be looked up at once.

    Attributes:
        open: the pending lookup of each chunk, for others to share.
        waiting_chunks: number of chunks that tiers are asked for and have not answered.
        limit: number of chunks after which no further request's lookups begin.
    """

    def __init__(self) -> None:
        self.open: dict[OffloadKey, PendingLookup] = {}
        self.waiting_chunks = 0
        self.limit = MOST_CHUNKS
        # Chunks of this step that cost time and no question to a tier.
        self._joined = 0
        self._new: list[PendingLookup] = []

    @property
    def is_full(self) -> bool:
        """True if no further request's lookups may begin in this step."""
        return self.waiting_chunks + self._joined >= self.limit

    def begin(
        self, request: RequestContext, tiers: int, step: int, *, shared: bool
    ) -> PendingLookup:
        """Begin a lookup, to be handed over at the end of the step."""
        pending = PendingLookup(request, tiers, step, shared=shared)
        self._new.append(pending)
        return pending

    def add(self, pending: PendingLookup, key: OffloadKey) -> None:
        """Add a chunk to a lookup that is not handed over."""
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
        """Take the end of a step."""
        self._joined = 0

    def take_new(self) -> list[PendingLookup]:
        """Take the lookups that no tier has been asked yet, and seal them.

        Among them are chunks that no tier is asked for, since they are known to be there.
        """
        taken, self._new = self._new, []
        for pending in taken:
            pending.sealed = True
        return taken

    def answered(self, pending: PendingLookup, bit: int, verdicts: Sequence[Verdict]) -> None:
        """Take a tier's answers; one that comes after the lookup was given up is ignored."""
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
        """Drop every lookup: answers that are under way belong to no request."""
        self.open.clear()
        for pending in self._new:
            if pending.waiting:
                self.waiting_chunks -= len(pending.keys)
        self._new.clear()

    def _close(self, pending: PendingLookup) -> None:
        self.waiting_chunks -= len(pending.keys)
        for key in pending.keys:
            # The lookup of a request that may not ask all tiers is never open to others.
            if self.open.get(key) is pending:
                del self.open[key]
