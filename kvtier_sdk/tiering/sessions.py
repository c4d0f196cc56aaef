"""Remembers which chunks belong to the sessions that callers name."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.types import OffloadKey


class Sessions:
    """The chunks of the last request of each named session.

    The session that was used least recently is forgotten first.

    Args:
        most_chunks: the most chunks to remember, of all sessions together; each takes 8 bytes
            beside its key.
    """

    def __init__(self, most_chunks: int) -> None:
        self._most_chunks = most_chunks
        self._chunks = 0
        self._sessions: dict[tuple[str, str], Sequence[OffloadKey]] = {}

    def note(self, tenant: str, session: str, keys: Sequence[OffloadKey]) -> None:
        """Record the chunks of a session's request, in prefix order."""
        self.forget(tenant, session)
        self._sessions[tenant, session] = keys
        self._chunks += len(keys) + 1
        while self._chunks > self._most_chunks:
            self.forget(*next(iter(self._sessions)))

    def chunks(self, tenant: str, session: str) -> Sequence[OffloadKey]:
        return self._sessions.get((tenant, session), ())

    def own_chunks(self, tenant: str, session: str) -> Sequence[OffloadKey]:
        """Return the chunks that no other known session begins with."""
        keys = self.chunks(tenant, session)
        shared = 0
        for name, others in self._sessions.items():
            if name != (tenant, session):
                while shared < min(len(keys), len(others)) and keys[shared] == others[shared]:
                    shared += 1
        return keys[shared:]

    def forget(self, tenant: str, session: str) -> None:
        keys = self._sessions.pop((tenant, session), None)
        if keys is not None:
            self._chunks -= len(keys) + 1
