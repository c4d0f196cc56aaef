"""Opens single tiers for the ``kvtier tier`` commands, even while engines use them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError, TierError, TierTimeoutError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.opening import BlockingTier
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.tier_client import NO_REQUEST, TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.types import Capability, Entry, OffloadKey, Usage

T = TypeVar("T")

#: A tier cannot be opened without a namespace, even if no chunk is read or written.
_NO_NAMESPACE = Namespace({"engine": "kvtier tier"})
_PAGE = 1000
_EXAMINED_BYTES = 64 * 2**20
#: A placeholder for an unknown chunk length. Chunks of unknown length are never loaded.
_UNKNOWN_BYTES = 4096
#: The maximum chunk length accepted from a manifest. This maximum limits the allocated memory.
_MOST_CHUNK_BYTES = 2**30
#: Retry at least this often, because a failure ends the command. 7 retries take 2.5 s.
_RETRIES = 7
#: The verdicts that concern one chunk. All other verdicts concern the whole tier.
_OF_A_CHUNK = (
    Verdict.OK,
    Verdict.NOT_FOUND,
    Verdict.CORRUPT,
    Verdict.AUTH,
    Verdict.CAPACITY,
    Verdict.FAILED,
)


@contextmanager
def open_for_maintenance(
    spec: TierSpec,
    namespace: Namespace = _NO_NAMESPACE,
    *,
    timeout_s: float = 60.0,
    pool: HostPool | None = None,
    stores: bool = False,
    clock: Clock | None = None,
) -> Iterator[MaintainedTier]:
    """Open a tier in a thread, and close it at the end. Engines may use the tier meanwhile."""
    clock = clock or SystemClock()
    deadlines = ("open_deadline_s", "lookup_deadline_s", "load_deadline_s", "store_deadline_s")
    options: dict[str, object] = {"required": True, **dict.fromkeys(deadlines, timeout_s)}
    options["retries"] = max(_RETRIES, spec.runner.retries)
    if not stores:
        options["compress"] = "never"
    if isinstance(namespace, StoredNamespace) and "codec" not in namespace.facts:
        options["codec"] = None
    spec = replace(spec, runner=spec.runner.model_copy(update=options))
    with ExitStack() as ended:
        if pool is None:
            chunk_bytes = chunk_bytes_of(namespace) or _UNKNOWN_BYTES
            pool = HostPool(max(1, _EXAMINED_BYTES // chunk_bytes), chunk_bytes)
            ended.callback(pool.close)
        reported = threading.Event()
        runner = ThreadRunner(
            spec,
            namespace=namespace,
            pool=pool,
            clock=clock,
            notify=reported.set,
            maintenance=not stores,
        )
        client = TierClient(spec, runner, TierListener(), clock=clock, chunk_bytes=pool.chunk_bytes)
        ended.callback(client.close, timeout_s)
        client.open()
        yield MaintainedTier(client, reported, clock, runner, pool, timeout_s)


def chunk_bytes_of(namespace: Namespace) -> int | None:
    """Return a namespace's chunk length, or ``None`` if the facts contain no usable length."""
    known = namespace.facts.get("chunk_bytes")
    return known if isinstance(known, int) and 0 < known <= _MOST_CHUNK_BYTES else None


@dataclass(eq=False)
class MaintainedTier(BlockingTier):
    """A tier for a tool's thread. The methods raise :class:`TierError` if the tier itself fails."""

    _runner: ThreadRunner
    _pool: HostPool
    _timeout_s: float
    compressed_chunks: int = 0  # among the loaded and stored chunks

    def need(self, capability: Capability, doing: str) -> None:
        spec = self.client.spec
        if capability not in spec.tier_class.capabilities:
            raise ConfigError(f"tier {spec.name!r}: backend {spec.backend!r} cannot {doing}")

    def entries(self) -> Iterator[Entry]:
        self.need(Capability.SCAN, "list its chunks")
        return self._iterate(TierCaller.entries)

    def namespaces(self) -> Iterator[StoredNamespace]:
        return self._iterate(TierCaller.namespaces)

    def usage(self) -> Usage:
        return self._runner.ask(TierCaller.usage, self._timeout_s)

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Verdict]:
        """Return ``OK`` or ``NOT_FOUND`` for each chunk."""
        found: list[Verdict] = []
        for page in pages(keys):
            job = self.client.lookup(page, NO_REQUEST)
            found += self._answer(job, Verdict.OK, Verdict.NOT_FOUND)
        return found

    @property
    def examined_at_once(self) -> int:
        return self._pool.slots

    def examine(self, keys: Sequence[OffloadKey]) -> list[Verdict]:
        """Read chunks and check each against its header, as an engine would."""
        parts = pages(keys, self.examined_at_once)
        return [one for part in parts for one in self.load(part, range(len(part)))]

    def load(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> list[Verdict]:
        job = self.client.load(list(keys), list(slots), NO_REQUEST, whole=True, tag=self)
        return self._answer(job, *_OF_A_CHUNK)

    def begin_store(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Callable[[], object]:
        """Begin a store; return a function that waits for its end."""
        job = self.client.store(list(keys), list(slots), NO_REQUEST, whole=True)
        self.client.flush()
        return lambda: self._answer(job, Verdict.OK)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete chunks; ignore missing chunks."""
        for page in pages(keys):
            self._answer(self.client.delete(page), Verdict.OK)

    def _answer(self, job: Job | None, *expected: Verdict) -> list[Verdict]:
        """Return a job's verdicts; raise an error if a verdict is not expected."""
        result = self.result_of(job)
        self.compressed_chunks += result.compressed_chunks
        for verdict in result.verdicts:
            if verdict not in expected:
                raise TierError(result.error or f"{self.client.spec.name}: {verdict.value}")
        if not result.released:
            raise TierTimeoutError(f"{self.client.spec.name}: a call hangs")
        return result.verdicts

    def _iterate(self, iterate: Callable[[TierCaller], AsyncIterator[T]]) -> Iterator[T]:
        opened: list[AsyncIterator[T]] = []

        async def take(call: TierCaller) -> list[T]:
            if not opened:
                opened.append(iterate(call))
            page: list[T] = []
            async for item in opened[0]:
                page.append(item)
                if len(page) == _PAGE:
                    break
            return page

        while page := self._runner.ask(take, self._timeout_s):
            yield from page


def pages(keys: Sequence[OffloadKey], most: int = _PAGE) -> Iterator[Sequence[OffloadKey]]:
    for start in range(0, len(keys), most):
        yield keys[start : start + most]
