"""The interface of an accelerator. To add one, implement it in one file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch

from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.planning import GroupLayout, HostLayout, JobPlan

StreamOrEvent: TypeAlias = torch.Stream | torch.Event


class Copy(ABC):
    """A started copy."""

    @abstractmethod
    def done(self) -> bool:
        """Return true once the copy has ended or failed. Never blocks.

        From then on nothing reads or writes the memory of its plan, even if it failed.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block until the copy has ended, without holding the interpreter lock.

        Does not raise the failure of a copy; see :meth:`error`.
        """

    @abstractmethod
    def error(self) -> str | None:
        """Return the reason why an ended copy failed, or ``None`` if it succeeded."""

    @abstractmethod
    def duration_s(self) -> float:
        """Return the seconds from an ended copy's first byte to its last, without queues."""


class Device(ABC):
    """Moves the bytes of plans in the background.

    The engine owns the tensors and the pool owns the slots; a device allocates neither.
    """

    @abstractmethod
    def register(self, host: HostLayout, groups: Sequence[GroupLayout]) -> None:
        """Pin host memory for asynchronous copies; called once, before the first copy.

        It stays pinned until :meth:`close`. If pinning is refused, copies still work, but slower.

        Args:
            host: the slots.
            groups: the layouts of all groups, for preparations that need nothing else.
        """

    @abstractmethod
    def start(
        self,
        plan: JobPlan,
        operation: Operation,
        *,
        expedited: bool,
        after: StreamOrEvent | None,
    ) -> Copy:
        """Start a copy and return at once. Several threads may call it at the same time.

        Args:
            plan: the blocks and slots of the job, with at least one block.
            operation: ``STORE``, from the device to the host, or ``LOAD``. Loads overtake stores.
            expedited: let this load overtake other loads, even a load that has begun.
            after: a stream or an event: the copy begins after the work that is queued on the stream
                so far, or after the event.

        Returns:
            The copy. Its memory must stay allocated until it is done.

        Raises:
            ValueError: ``after`` is ``None`` on a device that computes in the background.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads, streams and pinned memory. Every copy must have ended."""
