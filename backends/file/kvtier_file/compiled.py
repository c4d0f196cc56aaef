"""The compiled part of the tier, if it is installed."""

from __future__ import annotations

__all__ = ["ABSENT", "DONE", "NOT_DONE", "batch_io"]

try:
    from kvtier_file import _batch_io as batch_io
except ImportError:
    batch_io = None  # type: ignore[assignment]

#: The outcomes for a chunk of a batch; see ``_batch_io.pyi``.
NOT_DONE, DONE, ABSENT = range(3)
