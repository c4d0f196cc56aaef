"""Chunks that other engines sealed with keys that this engine lacks."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

from kvtier_sdk.types import OffloadKey

#: How many chunks are remembered; beyond that, the ones found longest ago are forgotten.
_MAX_CHUNKS = 16_384


class _State(Enum):
    FOUND = auto()
    REPLACED = auto()
    LEFT = auto()


class ForeignChunks:
    """Remembers which foreign chunks were found, and which of them were replaced.

    A foreign chunk is replaced once by this engine's own. So chunks sealed with a key that was
    removed from all key files are replaced as they are needed. A chunk that is foreign again
    afterwards comes from an engine that still has the other key: it is left, so that two engines
    with different keys do not replace each other's chunks forever.
    """

    def __init__(self) -> None:
        self._states: OrderedDict[OffloadKey, _State] = OrderedDict()

    def note_found(self, key: OffloadKey) -> None:
        """Record that a load has found a foreign chunk."""
        was_replaced = self._states.pop(key, _State.FOUND) is not _State.FOUND
        self._states[key] = _State.LEFT if was_replaced else _State.FOUND
        if len(self._states) > _MAX_CHUNKS:
            self._states.popitem(last=False)

    def note_replaced(self, key: OffloadKey) -> None:
        """Record that a foreign chunk was replaced."""
        self._states[key] = _State.REPLACED

    def is_to_replace(self, key: OffloadKey) -> bool:
        """Return true if the chunk with this key is foreign and may be replaced."""
        return self._states.get(key) is _State.FOUND

    def is_left(self, key: OffloadKey) -> bool:
        """Return true if the chunk with this key must be left as it is."""
        return self._states.get(key) is _State.LEFT
