"""A tier opened by a tool while engines use it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierError, TierTimeoutError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.opening.blocking_tier import BlockingTier
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.tier_client import NO_REQUEST, TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.types import Capability, Entry, OffloadKey, Usage

T = TypeVar("T")

#: Chunks that are listed, deleted or looked up at once.
_PAGE = 1000
#: Memory for chunks that are examined at once.
_EXAMINED_BYTES = 64 * 2**20
#: Used if the length of a namespace's chunks is not known: such chunks are not loaded.
_UNKNOWN_BYTES = 4096
#: A manifest that claims more is not believed, because as much memory would be allocated.
_MOST_CHUNK_BYTES = 2**30
#: Verdicts that concern one chunk; all others concern the tier.
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
    namespace: Namespace,
    *,
    timeout_s: float = 60.0,
    pool: HostPool | None = None,
    stores: bool = False,
    clock: Clock | None = None,
) -> Iterator[MaintainedTier]:
    """Open a tier beside the engines that use it, and close it at the end.

    It runs in a thread. Unless ``stores`` is true, it makes no namespace, evicts nothing, records
    no use, and deletes only on request (:attr:`TierContext.maintenance`).

    Raises:
        ConfigError: an option is wrong, or the tier cannot work with it.
        TierError: the tier cannot be reached, or refuses the credentials.
    """
    clock = clock or SystemClock()
    deadlines = ("open_deadline_s", "lookup_deadline_s", "load_deadline_s", "store_deadline_s")
    options: dict[str, object] = {"required": True, **dict.fromkeys(deadlines, timeout_s)}
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
        tier = BlockingTier(client, reported, clock)
        yield MaintainedTier(tier, runner, namespace, pool, timeout_s)


def chunk_bytes_of(namespace: Namespace) -> int | None:
    """Return the length of a namespace's chunks; ``None`` if its facts do not include it."""
    known = namespace.facts.get("chunk_bytes")
    return known if isinstance(known, int) and 0 < known <= _MOST_CHUNK_BYTES else None


class MaintainedTier:
    """A tier for a tool. Every method waits for the tier's answer; all belong to one thread.

    Made by :func:`open_for_maintenance`.

    Attributes:
        spec: the tier.
        namespace: the namespace of the chunks that are listed, examined and deleted.
    """

    def __init__(
        self,
        tier: BlockingTier,
        runner: ThreadRunner,
        namespace: Namespace,
        pool: HostPool,
        timeout_s: float,
    ) -> None:
        self.spec = tier.client.spec
        self.namespace = namespace
        self._tier = tier
        self._client = tier.client
        self._runner = runner
        self._pool = pool
        self._timeout_s = timeout_s

    def can(self, capability: Capability) -> bool:
        """Return true if the tier declares a capability."""
        return capability in self.spec.tier_class.capabilities

    def entries(self) -> Iterator[Entry]:
        """Iterate over the chunks of the namespace. Needs ``Capability.SCAN``.

        Raises:
            TierError: the tier cannot be read.
        """
        return self._iterate(TierCaller.entries)

    def namespaces(self) -> Iterator[StoredNamespace]:
        """Iterate over all namespaces in the tier. Needs ``Capability.NAMESPACES``.

        Raises:
            TierError: the tier cannot be read.
        """
        return self._iterate(TierCaller.namespaces)

    def usage(self) -> Usage:
        """Return how full the tier is. Needs ``Capability.USAGE``.

        Raises:
            TierError: the tier cannot be read.
        """
        return self._runner.ask(TierCaller.usage, self._timeout_s)

    def lookup(self, keys: Sequence[OffloadKey]) -> list[Verdict]:
        """Look up chunks.

        Raises:
            TierError: the lookup failed.
        """
        return [
            verdict
            for page in _pages(keys, _PAGE)
            for verdict in self._answer(
                self._client.lookup(page, NO_REQUEST), (Verdict.OK, Verdict.NOT_FOUND)
            )
        ]

    @property
    def examined_at_once(self) -> int:
        """Number of chunks that :meth:`examine` has memory for."""
        return self._pool.slots

    def examine(self, keys: Sequence[OffloadKey]) -> list[Verdict]:
        """Read chunks and compare each with its header, as an engine would.

        Raises:
            TierError: the tier cannot be reached.
        """
        return self.load(keys, range(len(keys)))

    def load(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> list[Verdict]:
        """Read chunks into slots. Returns and raises as :meth:`examine`."""
        job = self._client.load(list(keys), list(slots), NO_REQUEST, whole=True, tag=self)
        return self._answer(job, _OF_A_CHUNK)

    def begin_store(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Callable[[], None]:
        """Begin to store chunks; return a function that waits for the store."""
        job = self._client.store(list(keys), list(slots), NO_REQUEST, whole=True)
        self._client.flush()
        return lambda: self._wait_for_store(job)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete chunks; missing ones are ignored. Needs ``Capability.DELETE``.

        Raises:
            TierError: some could not be deleted.
        """
        for page in _pages(keys, _PAGE):
            self._answer(self._client.delete(page), (Verdict.OK,))

    def _wait_for_store(self, job: Job | None) -> None:
        self._answer(job, (Verdict.OK,))

    def _answer(self, job: Job | None, expected: tuple[Verdict, ...]) -> list[Verdict]:
        """Hand a job over, wait for its verdicts, and raise if one is not expected."""
        result = self._tier.result_of(job)
        for verdict in result.verdicts:
            if verdict not in expected:
                raise TierError(result.error or f"{self.spec.name}: {verdict.value}")
        if not result.released:
            raise TierTimeoutError(f"{self.spec.name}: a call hangs")
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


def _pages(keys: Sequence[OffloadKey], length: int) -> Iterator[list[OffloadKey]]:
    rest = iter(keys)
    while page := list(islice(rest, length)):
        yield page
