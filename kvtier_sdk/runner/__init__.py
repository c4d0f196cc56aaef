"""Runs a tier's jobs on an event loop, in a thread or in a separate process."""

from kvtier_sdk.runner.loop import TierLoop as TierLoop
from kvtier_sdk.runner.loop_thread import TierRunner as TierRunner
from kvtier_sdk.runner.process.runner import ProcessRunner as ProcessRunner
from kvtier_sdk.runner.thread import ThreadRunner as ThreadRunner
