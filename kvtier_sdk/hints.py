"""A caller's hints about the next use of a request's chunks, and the receipts for the hints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

#: The default priority of a retained range, from 0 to 100, as in NVIDIA's TensorRT-LLM.
DEFAULT_PRIORITY: Final = 35


class Verb(Enum):
    """The action that a hint asks for."""

    #: Keep chunks in the pool for a time, which each use renews.
    PIN = "pin"
    #: Evict chunks after all others, the lowest priority first, until a given time.
    RETAIN = "retain"
    #: The next turn of the conversation comes after this time.
    RESUME_IN = "resume_in"
    #: Load a session's chunks from the tiers into the pool before its next turn.
    PREFETCH = "prefetch"
    #: Evict the request's chunks from the pool before others; the tiers keep them.
    DEMOTE = "demote"
    #: The session is over, so no tier needs to store more of its chunks.
    END = "end"
    #: A hint that cannot be read.
    UNKNOWN = "unknown"


class Outcome(Enum):
    """The outcome of a hint."""

    ACCEPTED = "accepted"
    #: Accepted for fewer chunks, or for a shorter time, than the caller asked for.
    CLIPPED = "clipped"
    #: To be carried out later; another receipt follows.
    DEFERRED = "deferred"
    REFUSED = "refused"
    #: Given up before it was carried out, for example because its time passed.
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Hint:
    """A caller's hint about the chunks of a request or a session.

    Attributes:
        verb: the action.
        duration_s: for a pin or a retained range, its duration in seconds.
        tokens: for a pin or a retained range, the indexes of its first token and of the token after
            its last; ``None`` for the whole prompt and answer.
        priority: for a retained range, 0 to 100; ``None`` for the request's priority.
        session: for a prefetch, the session whose chunks are loaded at once; ``None`` to load the
            request's own session before its next turn.
        mistake: the reason why the hint cannot be read; empty for a readable hint.
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
        request_id: the request that carried the hint; empty for an operator's hint.
        session: the session that the hint concerns, if the session has a name.
        tenant: the tenant whose budget is used.
        verb: the action that the hint asked for.
        outcome: the hint's outcome.
        chunks: number of chunks that the hint covers.
        duration_s: seconds that the hint lasts, or that remain before it is carried out, if any.
        reason: the reason why the hint was not accepted in full; empty if it was.
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
