"""Draws the hints that requests and an operator give in a simulation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from kvtier_sdk.engine import read_request
from kvtier_sdk.hints import Hint, Verb
from kvtier_sdk.tiering.hint_executor import OperatorHint
from kvtier_sdk.types import OffloadKey, RequestContext

#: The number of tokens in a chunk, for the token ranges in hints.
TOKENS: Final = 16
#: Durations of leases: a small part of a simulation, about half, and longer than the whole.
_DURATIONS_S = (0.05, 0.5, 100.0)


class HintGiver:
    def __init__(self, seed: int) -> None:
        # Leave most simulations without hints, so that seeds known to find a bug still find it.
        self.is_active = seed % 3 == 1
        rng = self._rng = random.Random(f"hints {seed}")
        self.share: float = rng.choice([0.1, 0.25, 0.5, 1.0])
        self.longest_s: float = rng.choice([0.3, 3.0, 200.0])
        self._operator_rate: float = rng.choice([0.0, 0.2])
        # The latest tenants and sessions. Operators and prefetches name one of these.
        self._named: deque[tuple[str, str]] = deque([("a", "aa")], maxlen=6)

    def request(self, request_id: str, path: bytes) -> RequestContext:
        rng = self._rng
        if not self.is_active or rng.random() < 0.3:
            return RequestContext(request_id)
        if rng.random() < 0.02:
            return read_request(request_id, {"kvtier": {"pinn": True}})
        table: dict[str, Any] = {}
        table["tenant"] = path[:1].decode() if rng.random() < 0.8 else "z"
        if rng.random() < 0.8:
            table["session"] = path[:2].decode()
            self._named.append((table["tenant"], table["session"]))
        self._add_lease(table, len(path))
        if rng.random() < 0.5:
            table["resume_in"] = rng.choice([0.0, 0.5, 2.0, 100.0])
            table["prefetch"] = rng.random() < 0.7
        elif rng.random() < 0.3:
            table["tenant"], table["prefetch"] = rng.choice(self._named)
        table["demote"] = rng.random() < 0.1
        table["end"] = rng.random() < 0.15
        return read_request(request_id, {"kvtier": table})

    def end_tokens(self, keys: Sequence[OffloadKey], groups: int) -> dict[OffloadKey, int] | None:
        if not self.is_active or self._rng.random() < 0.3:
            return None
        return {key: TOKENS * (index // groups + 1) for index, key in enumerate(keys)}

    def of_operator(self) -> OperatorHint | None:
        rng = self._rng
        if not self.is_active or rng.random() >= self._operator_rate:
            return None
        verb = rng.choice([Verb.PIN, Verb.PIN, Verb.PREFETCH, Verb.PREFETCH, Verb.END])
        duration_s = rng.choice(_DURATIONS_S) if verb is Verb.PIN else None
        tenant, session = rng.choice(self._named)
        return OperatorHint(Hint(verb, duration_s), session, tenant)

    def _add_lease(self, table: dict[str, Any], nodes: int) -> None:
        rng = self._rng
        kind = rng.choices(["pin", "retain", "unpin", ""], [4, 3, 1, 3])[0]
        if kind == "unpin":
            table["pin"] = "0s"
        elif kind:
            # Add only one lease. With two, the record could not tell which one ended other leases.
            lease: dict[str, Any] = {"for": rng.choice(_DURATIONS_S)}
            if rng.random() < 0.3:
                first = rng.randrange(TOKENS * nodes)
                lease["tokens"] = first, first + rng.randint(1, TOKENS * nodes)
            if kind == "retain" and rng.random() < 0.7:
                lease["priority"] = rng.choice([0, 35, 80])
            table[kind] = lease
