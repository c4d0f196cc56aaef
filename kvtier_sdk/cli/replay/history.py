"""The hits and the wait of each request of a replay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtier_sdk.cli.replay.workload import ReplayRequest


class ReplayHistory:
    """A few numbers for each request, in order of arrival, and for each depth of a prompt.

    Attributes:
        chunks: number of chunks of each request.
        hits: for the host pool and then each tier, the chunks that each request got from it.
        wait_s: seconds that each request waited, from its first lookup until its hits were in host
            memory.
        hits_at: for the host pool and then each tier, the number of hits at each depth, over all
            requests.
    """

    __slots__ = ("chunks", "hits", "hits_at", "wait_s")

    def __init__(self, workload: Sequence[ReplayRequest], sources: int) -> None:
        self.chunks = array("q", (len(request.keys) for request in workload))
        self.wait_s = array("d", bytes(8 * len(workload)))
        self.hits = [array("q", bytes(8 * len(workload))) for _ in range(sources)]
        longest = max(self.chunks, default=0)
        self.hits_at = [array("q", bytes(8 * longest)) for _ in range(sources)]

    def note_hits(self, number: int, depth: int, sources: Sequence[int]) -> None:
        """Record a request's hits from ``depth`` on; source -1 is the host pool."""
        for at, source in enumerate(sources, depth):
            self.hits[source + 1][number] += 1
            self.hits_at[source + 1][at] += 1
