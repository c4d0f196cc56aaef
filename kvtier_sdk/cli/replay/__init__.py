"""Replays a workload through the manager with real bytes, but without an engine."""

from kvtier_sdk.cli.replay.driver import replay as replay
from kvtier_sdk.cli.replay.report import ReplayHistory as ReplayHistory
from kvtier_sdk.cli.replay.report import ReplayReport as ReplayReport
from kvtier_sdk.cli.replay.report import TimeSaved as TimeSaved
from kvtier_sdk.cli.replay.sessions import SessionHits as SessionHits
from kvtier_sdk.cli.replay.sessions import SessionTurns as SessionTurns
from kvtier_sdk.cli.replay.workload import ReplayRequest as ReplayRequest
from kvtier_sdk.cli.replay.workload import chat_workload as chat_workload
from kvtier_sdk.cli.replay.workload import read_trace as read_trace
