"""A caller's hints about the next use of a request's chunks, and the receipts for the hints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

#: The default priority of a retained range, from 0 to 100, as in NVIDIA's TensorRT-LLM.
DEFAULT_PRIORITY: Final = 35


class Verb(Enum):
    """The action that a hint requests."""

    #: Keep chunks in the pool for a limited time, which starts again with each use.
    PIN = "pin"
    #: Until a given time, evict the chunks only after all other chunks, lowest priority first.
    RETAIN = "retain"
    #: Expect the next turn of the conversation a given time after the answer.
    RESUME_IN = "resume_in"
    #: Load a session's chunks from the tiers into the pool before the session's next turn.
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
    #: The hint was accepted for fewer chunks or for a shorter time than the caller requested.
    CLIPPED = "clipped"
    #: The hint will be carried out later; another receipt follows.
    DEFERRED = "deferred"
    REFUSED = "refused"
    #: The hint was dropped before it was carried out, for example because its time had passed.
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Hint:
    """A caller's hint about the chunks of a request or a session.

    Attributes:
        verb: the action.
        duration_s: seconds that a pin or a retained range lasts.
        tokens: the tokens of a pin or a retained range, from the first index up to but not
            including the second; ``None`` for the whole prompt and answer.
        priority: a retained range's priority, 0 to 100; ``None`` for the request's priority.
        session: the session whose chunks a prefetch loads immediately. If ``None``, a prefetch is
            for the request's session, and loads the chunks before the session's next turn.
        mistake: the reason why the hint is unreadable; empty for a readable hint.
    """

    verb: Verb
    duration_s: float | None = None
    tokens: tuple[int, int] | None = None
    priority: int | None = None
    session: str | None = None
    mistake: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one hint, and the reason for it.

    Attributes:
        request_id: the request that carried the hint; empty for an operator's hint.
        session: the session that the hint concerns, if the session has a name.
        tenant: the tenant whose budget is used.
        verb: the action that the hint requested.
        outcome: the hint's outcome.
        chunks: number of chunks that the hint covers.
        duration_s: seconds that the hint lasts, or seconds until its action; ``None`` if unknown.
        reason: the reason why the hint was not accepted in full; empty for a fully accepted hint.
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
