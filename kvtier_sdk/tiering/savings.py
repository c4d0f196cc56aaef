"""Counts hits, and the tokens and the compute time that hits save."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvtier_sdk.metrics import TierStats
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.types import GROUP_BYTES, OffloadKey

_BURSTS = 31
#: An estimate needs this many bursts, because an engine's first bursts are slow.
_FEWEST = 3
_LONGEST_S = 1.0  # a longer burst ends with the current step
_SHORTEST_S = 0.002  # a shorter burst is ignored, because no model computes a prompt this fast


class ComputeRate:
    """Measures the time to compute a chunk: the median of the last bursts, weighted by chunks.

    A burst begins with a step in which a request computes several chunks. A prompt causes such
    steps, but decoding does not. The burst ends one step after the last such step, because an
    engine that schedules ahead begins the next step before the prompt is computed.
    """

    def __init__(self) -> None:
        self.chunk_s: float | None = None  # ``None`` until enough bursts are known
        self._bursts: deque[tuple[float, int]] = deque(maxlen=_BURSTS)
        self._chunks = 0
        self._since_s = 0.0
        self._has_ended_step = False

    def named(self, chunks: int, now_s: float) -> None:
        if chunks > 1:
            if not self._chunks:
                self._since_s = now_s
            self._has_ended_step = False
        elif not self._chunks:
            return
        self._chunks += chunks

    def step_ended(self, now_s: float) -> None:
        if self._chunks:
            if self._has_ended_step or now_s - self._since_s > _LONGEST_S:
                self.burst_ended(now_s)
            self._has_ended_step = True

    def burst_ended(self, now_s: float) -> None:
        """End the current burst, whose chunks were all computed by ``now_s``."""
        chunks, self._chunks = self._chunks, 0
        self.note(chunks, now_s - self._since_s)

    def note(self, chunks: int, duration_s: float) -> None:
        if chunks < 2 or duration_s < _SHORTEST_S:
            return
        self._bursts.append((duration_s / chunks, chunks))
        if len(self._bursts) < _FEWEST:
            return
        left = sum(weight for _, weight in self._bursts) / 2
        for chunk_s, weight in sorted(self._bursts):
            left -= weight
            if left <= 0:
                self.chunk_s = chunk_s
                break


class Savings:
    """Counts the tiers' hits, and the tokens and the seconds that the hits have saved.

    If the ``namespace`` lacks the number of tokens per chunk, only hits are counted.
    ``recompute_s`` is the time to compute a chunk; ``None`` lets ``rate`` measure it.
    """

    def __init__(self, primary: TierStats, namespace: Namespace, recompute_s: float | None) -> None:
        self.rate = ComputeRate()
        facts = namespace.facts
        self.model = str(facts.get("model") or facts.get("model_files") or "")
        self._tokens = namespace.tokens_per_chunk
        self._is_measured = recompute_s is None
        self._stats: list[TierStats] = []
        self._untimed_tokens: Counter[int] = Counter()
        primary.recompute_s = recompute_s
        self.add(primary)

    def add(self, stats: TierStats) -> None:
        """Add a tier's ``stats``. The calls must follow the order of the tiers."""
        self._stats.append(stats)
        if self._tokens:
            stats.saved_tokens[self.model] = stats.saved_prefill_s[self.model] = 0

    def note(self, keys: Sequence[OffloadKey], sources: Sequence[int]) -> None:
        """Count ``keys`` as hits; ``sources`` has each hit's tier, -1 for the primary tier."""
        for tier, chunks in Counter(sources).items():
            self._stats[tier + 1].hit_chunks += chunks
        if not self._tokens:
            return
        tokens, loaded = self._tokens[0], list(sources)
        if keys and len(self._tokens) > 1:
            groups: dict[bytes, list[int]] = {}
            for key, source in zip(keys, sources, strict=True):
                groups.setdefault(key[-GROUP_BYTES:], []).append(source)
            # All groups cover the same tokens, but a sliding window loads only the last of them. So
            # count the group that loads the most. The namespace lacks groups beyond ``last``.
            last = len(self._tokens) - 1
            sizes = [
                (self._tokens[min(int.from_bytes(n, "big"), last)], of) for n, of in groups.items()
            ]
            tokens, loaded = max(sizes, key=lambda of: of[0] * len(of[1]))
        for tier, chunks in Counter(loaded).items():
            self._stats[tier + 1].saved_tokens[self.model] += chunks * tokens
            self._untimed_tokens[tier] += chunks * tokens

    def step_ended(self, now_s: float) -> None:
        """End a step at ``now_s``: update the measured speed, and count the saved seconds."""
        self.rate.step_ended(now_s)
        if self._is_measured:
            self._stats[0].recompute_s = self.rate.chunk_s
        chunk_s = self._stats[0].recompute_s
        if chunk_s is not None and self._untimed_tokens:
            # A token is a fraction of a chunk in each group. Add up the times for these fractions.
            token_s = chunk_s * sum(1 / tokens for tokens in self._tokens)
            for tier, tokens in self._untimed_tokens.items():
                self._stats[tier + 1].saved_prefill_s[self.model] += tokens * token_s
            self._untimed_tokens.clear()
