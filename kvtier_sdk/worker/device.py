"""The interface that each kind of device implements in its own module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch

from kvtier_sdk.worker.planning import GroupLayout, HostLayout, JobPlan

StreamOrEvent: TypeAlias = torch.Stream | torch.Event


class Copy(ABC):
    @abstractmethod
    def done(self) -> bool:
        """Return true if the copy has ended and no longer needs the plan's memory. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block, without the interpreter lock, until the copy has succeeded or failed."""

    @abstractmethod
    def outcome(self) -> tuple[str | None, float]:
        """Return a finished copy's error or ``None``, and the seconds for which it ran."""


class Device(ABC):
    """The base class of devices, which copy the bytes of plans in the background."""

    @abstractmethod
    def register(self, host: HostLayout, groups: Sequence[GroupLayout]) -> None:
        """Prepare copies of these groups, and pin host memory. Call this once, before any copy."""

    @abstractmethod
    def start(self, plan: JobPlan, after: StreamOrEvent | None) -> Copy:
        """Start a copy of at least one block, and return immediately. Any thread may call this.

        The plan's memory must stay allocated until the copy is done. Loads overtake stores, and an
        expedited load overtakes other loads, even a load that has begun. The copy waits for
        ``after``: for an event, or for all work queued so far on a stream. A device that computes
        in the background requires ``after``, and raises ValueError without it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads, streams and pinned memory. Every copy must have ended."""
