"""One tier's loop: queues, deadlines, retries, integrity, drain; and the thread it runs in."""

from kvtier_sdk.runner.base import SlotMemory, TierRunner
from kvtier_sdk.runner.thread_runner import ThreadRunner
from kvtier_sdk.runner.tier_loop import TierLoop

__all__ = ["SlotMemory", "ThreadRunner", "TierLoop", "TierRunner"]
