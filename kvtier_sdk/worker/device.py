"""What differs between accelerators. A new one is one file that implements this."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.planning import CopyPlan, HostLayout


class Copy(ABC):
    """A copy that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks; once true, always true.

        From then on nothing reads or writes the memory of its plan, a failed copy included.
        """

    @abstractmethod
    def wait(self) -> None:
        """Block, outside the interpreter lock, until it has ended. Does not raise its failure."""

    @abstractmethod
    def error(self) -> str | None:
        """Of a copy that has ended: why it failed, or ``None``."""

    @abstractmethod
    def duration_s(self) -> float:
        """Of a copy that has ended: seconds from its first byte to its last, queues not counted."""


class Device(ABC):
    """Moves the bytes of plans, in the background.

    The tensors are the engine's and the slots are the pool's: a device allocates neither.
    """

    @abstractmethod
    def register(self, host: HostLayout) -> None:
        """Make host memory fit for asynchronous copies (pin it), once, before the first copy.

        It stays so until :meth:`close`. Where that is refused, copies still work, slower.
        """

    @abstractmethod
    def start(self, plan: CopyPlan, operation: Operation, *, expedited: bool) -> Copy:
        """Start a copy and return at once.

        Args:
            plan: at least one run; its addresses have been checked, its destinations are disjoint.
            operation: ``STORE``, from the device to the host, or ``LOAD``. The copy begins after
                what the engine has queued on the device so far. Loads overtake stores.
            expedited: a load that overtakes the other loads.

        Returns:
            The copy; its memory must stay until it is done.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, streams and registered memory; every copy has ended."""
