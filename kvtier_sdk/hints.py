"""Hints: what a caller knows about the next use of a request's chunks, and the receipts for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

#: The priority of a retained range if nobody names one, from 0 to 100. NVIDIA's TensorRT-LLM has
#: the same scale and default.
DEFAULT_PRIORITY: Final = 35


class Verb(Enum):
    """The deed that a hint asks for."""

    #: Keep chunks in the pool for a time, which each use renews.
    PIN = "pin"
    #: Evict chunks after all others until a time, those of lower priority first.
    RETAIN = "retain"
    #: The next turn of the conversation comes after this time.
    RESUME_IN = "resume_in"
    #: Load a session's chunks from the tiers into the pool before its next turn.
    PREFETCH = "prefetch"
    #: Evict the request's chunks from the pool before others; the tiers keep them.
    DEMOTE = "demote"
    #: The session is over: no tier need store what it stores from now on.
    END = "end"
    #: A hint that cannot be read.
    UNKNOWN = "unknown"


class Outcome(Enum):
    """The outcome of a hint."""

    ACCEPTED = "accepted"
    #: Accepted for fewer chunks, or for a shorter time, than asked.
    CLIPPED = "clipped"
    #: Its time has not come; another receipt follows.
    DEFERRED = "deferred"
    REFUSED = "refused"
    #: Given up before it was done, for example because its time went by.
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Hint:
    """One thing that a request's caller asks for.

    Attributes:
        verb: what is asked for.
        duration_s: for a pin or a retained range, how long.
        tokens: for a pin or a retained range, the first token and the one after the last; the whole
            prompt and answer if ``None``.
        priority: for a retained range, 0 to 100; the request's priority if ``None``.
        session: for a prefetch, the session whose chunks are loaded at once; the request's own
            session, before its next turn, if ``None``.
        mistake: why the hint cannot be read; empty if it can.
    """

    verb: Verb
    duration_s: float | None = None
    tokens: tuple[int, int] | None = None
    priority: int | None = None
    session: str | None = None
    mistake: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one hint, with the reason.

    Attributes:
        request_id: the request that brought the hint; empty if an operator asked.
        session: the session that is meant, if it has a name.
        tenant: whose budget is used.
        verb: what was asked for.
        outcome: what became of it.
        chunks: number of chunks for which the hint holds.
        duration_s: seconds for which it holds, or until it is carried out; ``None`` if neither.
        reason: why not all was accepted; empty if it was.
    """

    request_id: str
    session: str | None
    tenant: str
    verb: Verb
    outcome: Outcome
    chunks: int = 0
    duration_s: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        whose = f"session {self.session!r}" if self.session else f"request {self.request_id}"
        what = "hint" if self.verb is Verb.UNKNOWN else self.verb.value
        parts = [f"{what} for {whose}: {self.outcome.value}, {self.chunks:,} chunks"]
        if self.duration_s is not None:
            parts.append(f"{self.duration_s:.0f} s")
        return ", ".join(parts) + (f": {self.reason}" if self.reason else "")
