"""Runs a tier's jobs on an event loop, in a thread or in a separate process."""

from kvtier_sdk.runner.base import PoolMemory
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import TierRunner
from kvtier_sdk.runner.process.runner import ProcessRunner
from kvtier_sdk.runner.thread import ThreadRunner

__all__ = ["PoolMemory", "ProcessRunner", "ThreadRunner", "TierLoop", "TierRunner"]
