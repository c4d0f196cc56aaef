"""The policies that authors implement: what leaves a full primary tier, what a tier is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar

from kvtier_sdk.types import OffloadKey, RequestContext


class StoreMoment(Enum):
    """When a tier is offered a chunk."""

    #: As soon as the device has written it.
    STORED = "stored"
    #: Each time it is copied back to the device, until the tier has it.
    HIT = "hit"
    #: Before it leaves the primary tier.
    EVICTED = "evicted"


class StorePolicy(ABC):
    """Decides which chunks a tier is given, and when. Pure state, on the engine's thread.

    Attributes:
        moment: when the tier is offered a chunk.
        filters: whether :meth:`wants` is to be asked at all; where it is not, every chunk that
            is offered is given.

    Args:
        argument: what is written behind the policy's name and a colon, as in ``after_hits:2``;
            ``None`` where nothing is.

    Raises:
        ValueError: the argument is missing, or means nothing to this policy.
    """

    moment: ClassVar[StoreMoment]
    filters: ClassVar[bool] = True

    def __init__(self, argument: str | None) -> None:
        if argument is not None:
            raise ValueError(f"takes no argument, not {argument!r}")

    @abstractmethod
    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        """Say whether the tier gets a chunk.

        Args:
            key: the chunk.
            hits: how often it was copied back to the device since it came into the primary tier.
            request: who stored it or uses it.

        Returns:
            Whether it is given to the tier now.
        """


class EvictionPolicy(ABC):
    """Decides which chunk leaves a full primary tier. Pure state: no I/O, no clock, one thread.

    It is told of every readable chunk and of nothing else; a chunk that is being written is not
    its business yet.

    Attributes:
        uses_prefix: whether the policy wants ``parent`` and ``position``; where it does not,
            the engine's thread is spared finding them out, and they are ``None`` and 0.
    """

    uses_prefix: ClassVar[bool] = True

    def open(self, slots: int) -> None:
        """Learn how large the primary tier is. Called once, before everything else.

        Args:
            slots: how many chunks it holds at most.
        """
        return

    @abstractmethod
    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        """A chunk has become readable.

        Args:
            key: the chunk.
            parent: the chunk before it in its prefix, or ``None`` where it is the first or the
                order could not be learnt.
            position: its index in the prefix, counted from where the order is known.
            request: who brought it.
        """

    @abstractmethod
    def on_access(self, key: OffloadKey) -> None:
        """A chunk that the policy knows was used.

        Args:
            key: the chunk.
        """

    @abstractmethod
    def on_remove(self, key: OffloadKey) -> None:
        """A chunk is gone, by this policy's choice or otherwise.

        Args:
            key: a chunk that the policy knows.
        """

    @abstractmethod
    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        """Choose chunks to evict. They are removed by :meth:`on_remove`, not here.

        Args:
            count: how many are wanted.
            is_evictable: false for a chunk that is pinned now.

        Returns:
            Up to ``count`` distinct evictable chunks, the least valuable first; fewer only where
            there are no more.
        """
