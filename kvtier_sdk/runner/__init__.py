"""One tier's loop, from queues to drain; and the thread or the process it runs in."""

from kvtier_sdk.runner.base import JobLoop, PoolMemory, SlotMemory, TierRunner
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.process.runner import ProcessRunner, fault_of_process
from kvtier_sdk.runner.thread import ThreadRunner

__all__ = [
    "JobLoop",
    "PoolMemory",
    "ProcessRunner",
    "SlotMemory",
    "ThreadRunner",
    "TierLoop",
    "TierRunner",
    "fault_of_process",
]
