"""Replays a workload through the manager with real bytes, but without an engine."""

from kvtier_sdk.cli.replay.driver import replay
from kvtier_sdk.cli.replay.report import ReplayHistory, ReplayReport, TimeSaved
from kvtier_sdk.cli.replay.sessions import SessionHits, SessionTurns
from kvtier_sdk.cli.replay.workload import ReplayRequest, chat_workload, read_trace

__all__ = [
    "ReplayHistory",
    "ReplayReport",
    "ReplayRequest",
    "SessionHits",
    "SessionTurns",
    "TimeSaved",
    "chat_workload",
    "read_trace",
    "replay",
]
