"""Replays a workload through the manager, with real bytes but without an engine."""

from kvtier_sdk.cli.replay.driver import replay
from kvtier_sdk.cli.replay.report import ReplayHistory, ReplayReport
from kvtier_sdk.cli.replay.sweep import PoolSweep, SweepPoint, sweep_pool
from kvtier_sdk.cli.replay.workload import ReplayRequest, chat_workload, read_trace

__all__ = [
    "PoolSweep",
    "ReplayHistory",
    "ReplayReport",
    "ReplayRequest",
    "SweepPoint",
    "chat_workload",
    "read_trace",
    "replay",
    "sweep_pool",
]
