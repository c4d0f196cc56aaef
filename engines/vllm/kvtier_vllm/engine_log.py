"""kvtier's lines in vLLM's log."""

from __future__ import annotations

import logging


class _EngineLog(logging.Handler):
    """Hands lines to vLLM's logger, whose handlers vLLM replaces now and then."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        self._engine.handle(record)


def join_engine_log() -> None:
    """Give kvtier's lines vLLM's handlers, format and level. Further calls follow vLLM's level.

    vLLM configures its own logger only: without this, information is dropped, and warnings are
    printed without level and time. Where the program has a handler for kvtier's lines, or vLLM has
    none, nothing changes.
    """
    ours, engine = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if engine.hasHandlers() and not ours.hasHandlers():
        ours.addHandler(_EngineLog(engine))
        ours.propagate = False
    if any(isinstance(handler, _EngineLog) for handler in ours.handlers):
        ours.setLevel(engine.getEffectiveLevel())
