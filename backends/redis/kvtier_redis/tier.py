"""The Redis tier: chunks over connections of their own, all else through redis-py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import ClassVar

from kvtier_redis.config import RedisTierConfig
from kvtier_redis.connector import Connector
from kvtier_redis.dispatcher import Dispatcher
from kvtier_redis.faults import SettingError, reply_error, was_reset
from kvtier_redis.limits import limit_problem
from kvtier_redis.names import Names
from kvtier_redis.resp import Exchange, Kind, Reply, command, set_command
from kvtier_redis.routes import Route, open_route
from kvtier_sdk import (
    Capability,
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    Entry,
    Locality,
    Medium,
    OffloadKey,
    RequestContext,
    SecondaryTierManager,
    TierAuthError,
    TierCapacityError,
    TierContext,
    TierError,
    TierUnavailableError,
    Transfer,
    Usage,
)

# Keys that a scan asks the length of at a time.
_SCAN_BATCH = 500


class RedisTier(SecondaryTierManager):
    """Chunks as values of a Redis or Valkey server, a master behind Sentinel, or a Cluster.

    A chunk's header and payload are one value, so that the server evicts whole chunks.
    """

    config_model = RedisTierConfig
    medium = Medium.STORAGE
    locality = Locality.REMOTE
    capabilities = Capability.DELETE | Capability.TOUCH | Capability.SCAN | Capability.USAGE
    contract_version: ClassVar[int] = 1
    config: RedisTierConfig

    # Made by open(), on their loop.
    _route: Route
    _dispatcher: Dispatcher

    def __init__(self, config: RedisTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._names = Names(config.prefix, context.namespace)
        self._opened = AsyncExitStack()

    async def open(self) -> None:
        connector = Connector(self.config, self.context.clock)
        self._route = open_route(self.config, self.context.clock)
        self._opened.push_async_callback(self._route.close)
        self._dispatcher = Dispatcher(
            self._route,
            connector,
            connections=self.config.connections,
            object_bytes=self.context.object_bytes,
            clock=self.context.clock,
        )
        self._opened.callback(self._dispatcher.close)
        try:
            await self._route.open()
            await self._check_servers()
            await self._write_manifest()
        except SettingError as error:
            raise ConfigError(str(error)) from None
        except TierUnavailableError as error:
            # The reset can overtake the alert that says so.
            if self.config.tls and self.config.tls_cert is None and was_reset(error):
                raise TierUnavailableError(
                    f"{error}; if the server wants a certificate, give options 'tls_cert' and "
                    "'tls_key'"
                ) from error
            raise

    async def close(self) -> None:
        await self._opened.aclose()

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return [found == 1 for found in await self._run(keys, "EXISTS")]

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        ttl_ms = self.config.ttl_ms
        exchanges = []
        for transfer in batch:
            name = self._names.of(transfer.key)
            exchanges.append(Exchange(name, set_command(name, transfer.buffers, ttl_ms)))
        await self._dispatcher.run(exchanges)
        return [_error(exchange.outcome) for exchange in exchanges]

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        exchanges = []
        for transfer in batch:
            name = self._names.of(transfer.key)
            exchanges.append(Exchange(name, [command(b"GET", name)], transfer.buffers))
        await self._dispatcher.run(exchanges)
        return [
            _not_loaded(exchange.outcome, transfer.object_bytes)
            for exchange, transfer in zip(exchanges, batch, strict=True)
        ]

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        counts = await self._run(keys, "UNLINK")
        self.context.report_removed([key for key, count in zip(keys, counts, strict=True) if count])

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        if self.config.ttl_ms is None:
            await self._run(keys, "TOUCH")
        else:
            await self._run(keys, "PEXPIRE", b"%d" % self.config.ttl_ms)

    async def scan(self) -> AsyncIterator[Entry]:
        # The server may name a key twice.
        seen: set[OffloadKey] = set()
        batch: list[OffloadKey] = []
        async for name in self._route.names(self._names.pattern):
            key = self._names.key_in(name)
            if key in seen:
                continue
            seen.add(key)
            batch.append(key)
            if len(batch) == _SCAN_BATCH:
                for entry in await self._entries(batch):
                    yield entry
                batch.clear()
        for entry in await self._entries(batch):
            yield entry

    async def usage(self) -> Usage:
        facts = await self._route.facts()
        limits = [int(fact.get("maxmemory", 0)) for fact in facts]
        return Usage(
            chunks=sum(
                database["keys"]
                for fact in facts
                for name, database in fact.items()
                if name.startswith("db") and isinstance(database, dict)
            ),
            used_bytes=sum(int(fact["used_memory"]) for fact in facts),
            capacity_bytes=sum(limits) if all(limits) else None,
        )

    async def _run(self, keys: Sequence[OffloadKey], word: str, *rest: bytes) -> list[int]:
        commands: list[list[str | bytes]] = [[word, self._names.of(key), *rest] for key in keys]
        return await self._route.run(*commands)

    async def _entries(self, keys: Sequence[OffloadKey]) -> list[Entry]:
        lengths = await self._run(keys, "STRLEN")
        # A key that is gone by now has no length.
        return [Entry(key, length) for key, length in zip(keys, lengths, strict=True) if length]

    async def _check_servers(self) -> None:
        """Report settings of the servers that will cause errors later."""
        try:
            facts = await self._route.facts()
        except TierAuthError:
            return  # an ACL may forbid INFO, which nothing else needs
        if any(fact.get("cluster_enabled") for fact in facts) and not self._route.is_cluster:
            raise reply_error("MOVED")
        for problem in {limit_problem(fact, self.config.ttl_ms is not None) for fact in facts}:
            if problem:
                self.context.logger.warning("%s", problem)

    async def _write_manifest(self) -> None:
        manifest = self.context.namespace.manifest_json().encode()
        try:
            await self._route.run(("SET", self._names.manifest, manifest))
        except TierCapacityError as error:
            # Chunks that are there can be loaded all the same.
            self.context.logger.warning("the manifest was not written: %s", error)


def _error(outcome: Reply | TierError | None) -> TierError | None:
    return outcome if isinstance(outcome, TierError) else None


def _not_loaded(outcome: Reply | TierError | None, object_bytes: int) -> TierError | None:
    """The verdict of a load; ``None`` if the value is in its buffers."""
    if not isinstance(outcome, Reply):
        return outcome
    if outcome.kind is Kind.FILLED:
        return None
    if outcome.kind is Kind.ABSENT:
        return ChunkNotFoundError("no such chunk")
    return CorruptChunkError(f"{outcome.text} bytes stored; expected {object_bytes}")
