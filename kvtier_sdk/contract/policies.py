"""The interfaces of policies, which choose the chunks to evict and the chunks to store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar

from kvtier_sdk.types import OffloadKey, RequestContext


class StoreMoment(Enum):
    """The moment at which the SDK offers a chunk to a tier."""

    #: Immediately after the device has written the chunk.
    STORED = "stored"
    #: Each time the chunk is copied back to the device, until the tier has the chunk.
    HIT = "hit"
    #: Just before the primary tier evicts the chunk.
    EVICTED = "evicted"


class StorePolicy(ABC):
    """A policy that chooses which chunks a tier gets, and when.

    A policy does no I/O. The SDK uses it on the engine's thread only. If the policy below is
    installed under the entry point ``kvtier.store_policies`` as ``urgent``, the option
    ``store_policy = "urgent:80"`` selects it::

        class Urgent(StorePolicy):
            moment = StoreMoment.STORED

            def __init__(self, argument):
                if not argument:
                    raise ValueError("needs a priority, as in 'urgent:80'")
                self._least = int(argument)

            def wants(self, key, hits, request):
                return request.priority >= self._least

    Attributes:
        moment: the moment at which the SDK offers a chunk to the tier.
        filters: false if the tier gets every offered chunk, without calls of :meth:`wants`.

    Args:
        argument: the text after the colon, as in ``after_hits:2``; ``None`` if there is no colon.

    Raises:
        ValueError: the argument is missing, or this policy cannot use it.
    """

    moment: ClassVar[StoreMoment]
    filters: ClassVar[bool] = True

    def __init__(self, argument: str | None) -> None:
        if argument is not None:
            raise ValueError(f"takes no argument, not {argument!r}")

    @abstractmethod
    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        """Return true if the tier should get the chunk ``key``, which ``request`` stored or uses.

        ``hits`` is the number of copies to the device since the chunk entered the primary tier.
        """


class EvictionPolicy(ABC):
    """A policy that chooses the chunks to evict from a full primary tier.

    A policy does no I/O and reads no clock, and only one thread uses it. The policy learns of a
    chunk once the chunk is readable, not while it is written. This policy evicts the oldest chunk::

        class Oldest(EvictionPolicy):
            def __init__(self):
                self._keys = {}

            def on_insert(self, keys, request):
                self._keys.update(dict.fromkeys(reversed(keys)))

            def on_access(self, keys, request):
                pass

            def on_remove(self, key):
                del self._keys[key]

            def choose_victims(self, count, is_evictable):
                return list(itertools.islice(filter(is_evictable, self._keys), count))

    A chunk is useless without the chunks before it, so evict the end of a prefix first.

    Attributes:
        now_s: time of the engine's current step, in seconds from an arbitrary start.
    """

    now_s: float = 0.0

    def open(self, slots: int) -> None:
        """Prepare for a primary tier of ``slots`` chunks. The SDK calls this once, first."""
        return

    @abstractmethod
    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        """Record that the chunks ``keys``, in prefix order, have become readable.

        Either ``request`` has stored the chunks, or a tier has loaded them for ``request``.
        """

    @abstractmethod
    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        """Record that ``request`` uses the known chunks ``keys``, in prefix order."""

    def on_request_finished(self, request: RequestContext, stop: str | None) -> None:
        """Record that ``request`` has ended. Its last chunks may become readable later.

        ``stop`` is the reason why the answer ended, such as ``"tool_use"``; ``None`` if unknown.
        """
        return

    @abstractmethod
    def on_remove(self, key: OffloadKey) -> None:
        """Forget the known chunk ``key``, which has left the primary tier for any reason."""

    @abstractmethod
    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        """Choose ``count`` distinct chunks to evict, the least valuable first.

        ``is_evictable`` returns false for a pinned chunk. Return fewer chunks only if no others are
        evictable. The SDK calls :meth:`on_remove` for each chunk that it evicts.
        """
