"""This process's copy of a root's usage, updated from the ledger."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvtier_file.budget import Budget
from kvtier_file.ledger import DELETED, Change, Ledger, LedgerDamagedError
from kvtier_file.shared_header import SharedHeader
from kvtier_sdk import OffloadKey

# A ledger is compacted once it is longer than the minimum, and has grown by the factor since its
# last compaction. Compactions must be rare, because after a compaction every process reads the
# whole ledger under the lock.
_MIN_COMPACTION_BYTES = 2**20
_COMPACTION_GROWTH = 8


class UsageReplica:
    """This process's copy of the shared budget. Use it only while holding the shared lock."""

    def __init__(self, budget: Budget, fingerprint: str) -> None:
        self.budget = budget
        self._fingerprint = fingerprint
        self._removed: dict[OffloadKey, int] = {}  # removed chunks and the reasons
        # The budget includes the changes of this generation of the ledger, up to this offset.
        self._generation: int | None = None
        self._end = 0

    def catch_up(self, header: SharedHeader, ledger: Ledger) -> bool:
        """Apply the changes of other processes; return false if a recount is needed."""
        if not header.clean:
            return False
        known = header.generation == self._generation
        try:
            changes = list(ledger.read(self._end if known else 0, header.ledger_bytes))
        except LedgerDamagedError:
            return False
        if not known:
            self._clear()
        self.apply(changes)
        self._generation, self._end = header.generation, header.ledger_bytes
        # If the counters disagree with the ledger, a foreign program wrote to the files.
        return (len(self.budget), self.budget.used_bytes) == (header.chunks, header.used_bytes)

    def replace(self, chunks: Iterable[Change]) -> None:
        """Replace the budget's content with the chunks found on disk."""
        self._clear()
        self.apply(chunks)
        # The next publication must start a new generation, which other processes read in full.
        self.detach()

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes to the budget; keep this namespace's removals for `take_removed`."""
        add, discard, removed = self.budget.add, self.budget.discard, self._removed
        for fingerprint, key, size_bytes, used_ns in changes:
            if size_bytes >= 0:
                add(fingerprint, key, size_bytes, used_ns)
                if fingerprint == self._fingerprint:
                    removed.pop(key, None)
            else:
                discard(fingerprint, key)
                if fingerprint == self._fingerprint:
                    removed[key] = size_bytes

    def publish(self, header: SharedHeader, ledger: Ledger, changes: Sequence[Change]) -> None:
        """Append applied changes to the ledger, or compact the ledger; mark the header clean."""
        limit_bytes = max(_MIN_COMPACTION_BYTES, _COMPACTION_GROWTH * header.compacted_bytes)
        if self._generation is None or header.ledger_bytes > limit_bytes:
            header.ledger_bytes = header.compacted_bytes = ledger.compact(self.budget)
            header.generation = int.from_bytes(os.urandom(8), "little")
        else:
            header.ledger_bytes = ledger.append(changes, header.ledger_bytes)
        self._generation, self._end = header.generation, header.ledger_bytes
        header.clean = True

    def detach(self) -> None:
        self._generation = None

    def take_removed(self) -> dict[OffloadKey, int]:
        """Return the chunks removed from this namespace since the last call, with their reasons."""
        removed, self._removed = self._removed, {}
        return removed

    def _clear(self) -> None:
        self.apply([(fingerprint, key, DELETED, 0) for fingerprint, key, *_ in self.budget])
