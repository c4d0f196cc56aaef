"""kvtier's lines in vLLM's log."""

from __future__ import annotations

import logging


class _EngineLog(logging.Handler):
    """Passes lines to vLLM's logger, because vLLM may replace the logger's handlers."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        self._engine.handle(record)


def join_engine_log() -> None:
    """Log kvtier's lines through vLLM's handlers; call again when vLLM's level changes."""
    # vLLM configures only its own logger, so kvtier's logger needs a handler.
    ours, engine = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if engine.hasHandlers() and not ours.hasHandlers():
        ours.addHandler(_EngineLog(engine))
        ours.propagate = False
    if any(isinstance(handler, _EngineLog) for handler in ours.handlers):
        ours.setLevel(engine.getEffectiveLevel())
