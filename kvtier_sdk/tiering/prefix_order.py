"""The order of a request's chunks. Chain hashes hide the parent, so it is learnt from calls."""

from __future__ import annotations

from collections.abc import Collection

from kvtier_sdk.types import GROUP_BYTES, OffloadKey

_UNKNOWN = (None, 0)


class PrefixOrder:
    """Parent and position of one request's chunks, learnt from the order in which they are named.

    An engine looks a prefix up from its start, again in each step, and stores it in order. The
    chunk named before a new one is its parent. Each KV-cache group is a prefix of its own.
    """

    __slots__ = ("_known", "_latest")

    def __init__(self) -> None:
        self._known: dict[OffloadKey, tuple[OffloadKey | None, int]] = {}
        self._latest: dict[bytes, OffloadKey] = {}

    @property
    def keys(self) -> Collection[OffloadKey]:
        """The chunks, in the order in which they were first named."""
        return self._known.keys()

    def note(self, key: OffloadKey) -> tuple[OffloadKey | None, int]:
        """Record the next chunk that was named; return its parent and its position."""
        group = key[-GROUP_BYTES:]
        place = self._known.get(key)
        if place is None:
            parent = self._latest.get(group)
            place = (None, 0) if parent is None else (parent, self._known[parent][1] + 1)
            self._known[key] = place
        self._latest[group] = key
        return place


class NameOrder:
    """The chunks of one request, only in the order in which they were first named.

    It replaces a :class:`PrefixOrder` if the policy does not use parents and positions, at less
    than half of the cost.

    Attributes:
        keys: the chunks.
    """

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[OffloadKey, None] = {}

    def note(self, key: OffloadKey) -> tuple[None, int]:
        """Record the next chunk that was named; return an unknown parent and position."""
        self.keys[key] = None
        return _UNKNOWN
