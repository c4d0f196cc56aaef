"""Typed counters, each beside its meaning; whoever exports them reads these objects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierStats:
    """What one tier has done since its manager was made. The primary tier has one too.

    Attributes:
        name: the tier's.
        backend: the backend's name; ``"primary"`` for the host pool.
        hit_chunks: chunks that a request got and that came from this tier.
        stored_chunks: chunks written to it.
        loaded_chunks: chunks read from it.
        stored_bytes: payload of the stored chunks.
        loaded_bytes: payload of the loaded chunks.
        store_s: time that store jobs took, added up; overlapping jobs count each.
        load_s: time that load jobs took, added up.
        evicted_chunks: chunks that it let go of.
        found_chunks: chunks that a lookup asked it for and that it had.
        absent_chunks: chunks that a lookup asked it for and that it did not have.
        misses: of the primary tier: lookups that were answered ``MISS``, by reason, a chunk and
            request once.
        failures: chunks of failed loads, stores and lookups by ``operation.reason``.
        dropped: chunks that were not stored, or found and not loaded, by reason.
        errors: the last few error texts, the newest last.
    """

    name: str
    backend: str
    hit_chunks: int = 0
    stored_chunks: int = 0
    loaded_chunks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    evicted_chunks: int = 0
    found_chunks: int = 0
    absent_chunks: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def note_error(self, text: str) -> None:
        """Keep an error's text, unless it is among the last few already."""
        if text not in self.errors:
            self.errors = [*self.errors[-4:], text]


@dataclass(slots=True)
class PoolUsage:
    """How the host pool is used right now, in slots.

    Attributes:
        slots: all of them.
        free: empty.
        ready: holding a readable chunk.
        writing: being written by the device.
        loading: being written by a tier.
        quarantined: waiting for the end of a failed job's I/O.
        pinned: of the ready ones, those that cannot be evicted.
    """

    slots: int
    free: int
    ready: int
    writing: int
    loading: int
    quarantined: int
    pinned: int
