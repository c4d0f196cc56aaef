"""Replay: a workload played through the manager with real bytes, without an engine."""

from kvtier_sdk.replay.driver import replay
from kvtier_sdk.replay.report import ReplayReport
from kvtier_sdk.replay.workload import ReplayRequest, chat_workload, read_trace

__all__ = [
    "ReplayReport",
    "ReplayRequest",
    "chat_workload",
    "read_trace",
    "replay",
]
