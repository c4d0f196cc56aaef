"""Remembers the chunks of the sessions that callers name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvtier_sdk.types import OffloadKey

_NAMES: Final = 8  # a session's and a tenant's name take as much memory as this many keys


class Sessions:
    """The chunks of each session's last request. Beyond a limit, old sessions are forgotten."""

    def __init__(self, most_chunks: int) -> None:
        self._most_chunks = most_chunks
        self._chunks = 0
        self._sessions: dict[tuple[str, str], Sequence[OffloadKey]] = {}
        self._uses: Counter[OffloadKey] = Counter()

    def note(self, tenant: str, session: str, keys: Sequence[OffloadKey]) -> None:
        self.forget(tenant, session)
        self._sessions[tenant, session] = keys
        self._uses.update(keys)
        self._chunks += len(keys) + _NAMES
        while self._chunks > self._most_chunks:
            self.forget(*next(iter(self._sessions)))

    def chunks(self, tenant: str, session: str) -> Sequence[OffloadKey]:
        return self._sessions.get((tenant, session), ())

    def own_chunks(self, tenant: str, session: str) -> Sequence[OffloadKey]:
        uses = self._uses
        return [key for key in self.chunks(tenant, session) if uses[key] == 1]

    def forget(self, tenant: str, session: str) -> None:
        keys = self._sessions.pop((tenant, session), None)
        if keys is None:
            return
        self._chunks -= len(keys) + _NAMES
        uses = self._uses
        for key in keys:
            if uses[key] > 1:
                uses[key] -= 1
            else:
                del uses[key]
