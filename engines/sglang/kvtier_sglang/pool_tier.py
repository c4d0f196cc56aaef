"""The tier of one host pool, with blocking calls for SGLang's threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvtier_sdk import Operation, RequestContext, Verdict
from kvtier_sdk.engine import ModelTier, Work
from kvtier_sglang.identity import PageIdentity
from kvtier_sglang.pages import Pages, StagedPages

if TYPE_CHECKING:
    import torch

_request_ids = itertools.count()


class PoolTier:
    """A tier for the pages of one SGLang host pool. Thread-safe.

    A call returns only when its I/O has ended, because SGLang reuses the pages afterwards.
    """

    def __init__(self, chunks: ModelTier, pages: Pages, identity: PageIdentity) -> None:
        self.chunks = chunks
        self._pages = pages
        self._identity = identity

    def exist(self, hashes: Sequence[str]) -> list[bool]:
        """Return true for each page that the tier has; all are false after a timeout."""
        return self._run(Operation.LOOKUP, hashes, [])

    def move(
        self, operation: Operation, hashes: Sequence[str], indices: torch.Tensor
    ) -> list[bool]:
        if len(indices) != len(hashes) * self._pages.tokens:
            return [False] * len(hashes)
        return self._pages.move(operation, indices, partial(self._move, operation, hashes))

    def move_tensors(
        self, operation: Operation, hashes: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> list[bool]:
        """Move flat pages if the pool is staged; return true for each moved page."""
        if not isinstance(self._pages, StagedPages):
            return [False] * len(hashes)
        return self._pages.move_tensors(operation, tensors, partial(self._move, operation, hashes))

    @property
    def page_bytes(self) -> int:
        return self._pages.parts * self._pages.memory.chunk_bytes

    def close(self) -> None:
        """Wait until the tier has closed, and release the memory. Call ``chunks.close()`` first."""
        self.chunks.join()
        self._pages.close()

    def _move(
        self, operation: Operation, hashes: Sequence[str], pages: range, slots: Sequence[int]
    ) -> list[bool]:
        return self._run(operation, hashes[pages.start : pages.stop], slots)

    def _run(self, operation: Operation, hashes: Sequence[str], slots: Sequence[int]) -> list[bool]:
        parts = range(self._pages.parts)
        verdicts: list[Verdict] = []
        has_ended = threading.Event()

        def done(given: Sequence[Verdict], moved_bytes: int) -> None:
            verdicts.extend(given)
            has_ended.set()

        work = Work(operation, RequestContext(f"sglang-{next(_request_ids)}"), done)
        work.keys += [self._identity.key(page, part) for page in hashes for part in parts]
        work.slots += slots
        if not work.keys:
            return []
        self.chunks.submit(work)
        has_ended.wait()
        are_ok = [verdict is Verdict.OK for verdict in verdicts]
        return [
            all(are_ok[start : start + len(parts)]) for start in range(0, len(are_ok), len(parts))
        ]
