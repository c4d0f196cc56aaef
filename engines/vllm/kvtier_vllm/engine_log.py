"""Writes kvtier's log records to vLLM's log."""

from __future__ import annotations

import logging


class _EngineLog(logging.Handler):
    """A handler that passes records to vLLM's logger, whose own handlers vLLM may replace."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        self._engine.handle(record)


def join_engine_log() -> None:
    """Send kvtier's records to vLLM's handlers. Call this again after vLLM's level has changed."""
    # vLLM configures only its own logger, so kvtier's logger needs a handler.
    ours, engine = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if engine.hasHandlers() and not ours.hasHandlers():
        ours.addHandler(_EngineLog(engine))
        ours.propagate = False
    if any(isinstance(handler, _EngineLog) for handler in ours.handlers):
        ours.setLevel(engine.getEffectiveLevel())
