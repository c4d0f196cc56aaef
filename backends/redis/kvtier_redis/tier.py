"""The Redis tier. It uses redis-py only for requests without a chunk's name, such as ``SCAN``."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, ClassVar

from kvtier_redis.config import RedisTierConfig
from kvtier_redis.connector import Connector
from kvtier_redis.dispatcher import Dispatcher
from kvtier_redis.faults import SettingError, reply_error, was_reset
from kvtier_redis.names import Names
from kvtier_redis.resp import MOST_AT_ONCE, Exchange, Kind, Reply, command, set_command
from kvtier_redis.routes import Route, open_route
from kvtier_sdk import (
    Capability,
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    Entry,
    Locality,
    OffloadKey,
    RequestContext,
    SecondaryTierManager,
    StoredNamespace,
    TierCapacityError,
    TierContext,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    Transfer,
    Usage,
    check_any_answered,
)

# A batch moves this many bytes on a connection before a waiting batch may use the connection.
_TURN_BYTES = 2 * 2**20
# Connections to each server for small requests, such as lookups. More would not make them faster.
_COMMAND_CONNECTIONS = 4
# A scan requests the lengths of this many keys at once.
_SCAN_BATCH = 500
_LIMIT_ADVICE = (
    "set 'maxmemory' and 'maxmemory-policy allkeys-lru', in its configuration or by CONFIG SET"
)


class RedisTier(SecondaryTierManager):
    """A tier that stores chunks in a Redis or Valkey server, a Sentinel group, or a Cluster.

    A chunk's header and payload are one value, so that the server evicts whole chunks.
    """

    config_model = RedisTierConfig
    locality = Locality.REMOTE
    capabilities = (
        Capability.DELETE
        | Capability.TOUCH
        | Capability.SCAN
        | Capability.USAGE
        | Capability.NAMESPACES
    )
    contract_version: ClassVar[int] = 1
    config: RedisTierConfig

    # open() sets these attributes, on the event loop that uses them. Small requests have their own
    # dispatcher, so that they do not wait for transfers of chunks.
    _connector: Connector
    _route: Route
    _chunks: Dispatcher
    _commands: Dispatcher

    def __init__(self, config: RedisTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._names = Names(config.prefix, context.namespace)
        self._manifest = context.namespace.manifest_json().encode()
        # The expected length of the next value. Each load sets it to the loaded value's length.
        self._value_bytes = context.object_bytes
        self._opened = AsyncExitStack()
        self._has_warned = False

    async def open(self) -> None:
        clock = self.context.clock
        self._connector = Connector(self.config, clock, touches=not self.context.maintenance)
        self._route = open_route(self.config, clock)
        self._opened.push_async_callback(self._route.close)
        self._chunks = Dispatcher(
            self._route,
            self._connector.connect,
            connections=self.config.connections,
            turn=max(1, _TURN_BYTES // self.context.object_bytes),
            share=1,
            clock=clock,
        )
        self._opened.callback(self._chunks.close)
        self._commands = Dispatcher(
            self._route,
            partial(self._connector.connect, is_for_chunks=False),
            connections=_COMMAND_CONNECTIONS,
            turn=MOST_AT_ONCE,
            share=MOST_AT_ONCE,
            clock=clock,
        )
        self._opened.callback(self._commands.close)
        try:
            await self._route.open()
            await self._check_servers()
            if not self.context.maintenance:
                await self._write_manifest()
        except SettingError as error:
            raise ConfigError(str(error)) from None
        except (TierUnavailableError, TierTimeoutError) as error:
            raise await self._explained(error) from error

    async def close(self) -> None:
        await self._opened.aclose()

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        counts = await self._numbers(keys, b"EXISTS")
        check_any_answered(counts)
        return [count == 1 for count in counts]

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        started_s = self.context.clock.now_s()
        exchanges = []
        for transfer in batch:
            name = self._names.of(transfer.key)
            exchanges.append(
                Exchange(name, set_command(name, transfer.buffers, self.config.expiry_ms))
            )
        await self._chunks.run([*exchanges, *self._manifest_beside(exchanges)])
        verdicts = [_error(exchange.outcome) for exchange in exchanges]
        stored = [
            transfer.key
            for transfer, verdict in zip(batch, verdicts, strict=True)
            if verdict is None
        ]
        await self._mark_young(stored, started_s)
        return verdicts

    async def _mark_young(self, keys: Sequence[OffloadKey], stored_s: float) -> None:
        # Set marks only after the store. If a store fails, a new mark would let the old chunk
        # outlive its maximum age. A chunk without a mark only expires earlier.
        if not self.config.young_ms:
            return
        past_ms = math.ceil((self.context.clock.now_s() - stored_s) * 1000)
        if (left_ms := self.config.young_ms - past_ms) > 0:
            names = [self._names.young(key) for key in keys]
            asks = [command(b"SET", name, b"1", b"PX", b"%d" % left_ms) for name in names]
            await self._commands.run(
                [Exchange(name, [ask]) for name, ask in zip(names, asks, strict=True)]
            )

    def _manifest_beside(self, exchanges: Sequence[Exchange]) -> list[Exchange]:
        """Return a request to restore a lost manifest, if the batch uses the manifest's server."""
        # The batch must not wait for a server that stores none of its chunks.
        name = self._names.manifest
        with suppress(TierError):
            server = self._route.server_of(name)
            if any(self._route.server_of(exchange.name) == server for exchange in exchanges):
                asks = [command(b"SET", name, self._manifest, b"NX")]
                return [Exchange(name, asks, or_absent=True)]
        return []

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        exchanges = []
        for transfer in batch:
            name = self._names.of(transfer.key)
            asks = [command(b"GET", name)]
            exchanges.append(Exchange(name, asks, transfer.buffers, self._value_bytes))
        await self._chunks.run(exchanges)
        if self._connector.reads_are_uses and not self._has_warned:
            self._has_warned = True
            self.context.logger.warning(
                "this server counts the chunks that are read here as used: CLIENT NO-TOUCH, which "
                "would hide it, came with Redis 7.2"
            )
        verdicts = [
            _not_loaded(exchange.outcome, transfer)
            for exchange, transfer in zip(exchanges, batch, strict=True)
        ]
        for transfer, verdict in zip(batch, verdicts, strict=True):
            if verdict is None:
                self._value_bytes = len(transfer.header) + len(transfer.arrived)
        return verdicts

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        counts = await self._numbers(keys, b"UNLINK")
        self.context.report_removed(
            [key for key, count in zip(keys, counts, strict=True) if count == 1]
        )
        # Raise only now, because one failure must not keep other chunks from being deleted.
        for count in counts:
            if isinstance(count, TierError):
                raise count

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        extended = await self._extended(keys)
        expiry = b"%d" % (self.config.expiry_ms or 0)
        counts = await self._numbers(list(extended), b"PEXPIRE", after=[expiry])
        counts += await self._numbers([key for key in keys if key not in extended], b"TOUCH")
        check_any_answered(counts)

    async def scan(self) -> AsyncIterator[Entry]:
        # SCAN may return a key twice.
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

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        # Look at all names, because the server may have evicted a manifest and kept the chunks.
        fingerprints: set[str] = set()
        async for name in self._route.names(self._names.root_pattern):
            fingerprint = self._names.fingerprint_in(name)
            if fingerprint is not None and fingerprint not in fingerprints:
                fingerprints.add(fingerprint)
                manifest = await self._route.value(self._names.manifest_of(fingerprint))
                yield StoredNamespace.read(fingerprint, manifest)

    async def usage(self) -> Usage:
        facts = await self._route.facts()
        if not all("used_memory" in fact for fact in facts):
            # Count each key as an uncompressed chunk, so that the usage is never reported too low.
            keys = await self._route.key_count()
            return Usage(keys, keys * self.context.object_bytes, None)
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

    async def _extended(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Return the keys of the chunks that are young enough for a use to extend their expiry."""
        if self.config.ttl_s is None or self.config.young_ms == 0:
            return set()
        if self.config.young_ms is None:
            return set(keys)
        counts = await self._numbers(keys, b"EXISTS", name_of=self._names.young)
        return {key for key, count in zip(keys, counts, strict=True) if count == 1}

    async def _numbers(
        self,
        keys: Sequence[OffloadKey],
        *words: bytes,
        after: Sequence[bytes] = (),
        name_of: Callable[[OffloadKey], bytes] | None = None,
        or_absent: bool = False,
    ) -> list[int | TierError | None]:
        """Run a command on each key; return numbers, errors, and ``None`` for absent keys."""
        exchanges = []
        for name in map(name_of or self._names.of, keys):
            asks = [command(*words, name, *after)]
            exchanges.append(Exchange(name, asks, success=Kind.NUMBER, or_absent=or_absent))
        await self._commands.run(exchanges)
        return [
            int(outcome.text)
            if isinstance(outcome, Reply) and outcome.kind is Kind.NUMBER
            else _error(outcome)
            for outcome in (exchange.outcome for exchange in exchanges)
        ]

    async def _entries(self, keys: Sequence[OffloadKey]) -> list[Entry]:
        idle_s: Sequence[int | TierError | None] = [None] * len(keys)
        if self.context.maintenance:
            idle_s = await self._numbers(keys, b"OBJECT", b"IDLETIME", or_absent=True)
        # If STRLEN would count as a use, request the key's memory usage instead.
        words = (b"MEMORY", b"USAGE") if self._connector.reads_are_uses else (b"STRLEN",)
        lengths = await self._numbers(keys, *words, or_absent=True)
        now_s = self.context.clock.wall_s()
        entries = []
        for key, length, idle in zip(keys, lengths, idle_s, strict=True):
            if isinstance(length, TierError):
                raise length
            if length:  # the key may have vanished
                # A server with LFU eviction keeps no idle times, and answers with an error.
                used_s = now_s - idle if isinstance(idle, int) else None
                entries.append(Entry(key, length, used_s))
        return entries

    async def _check_servers(self) -> None:
        """Warn of server settings that will cause errors; raise if ``cluster`` must be set."""
        facts = await self._route.facts()
        if any(fact.get("cluster_enabled") for fact in facts) and not self._route.is_cluster:
            raise reply_error("MOVED")
        if self.context.maintenance:  # maintenance stores no chunks
            return
        for problem in {_limit_problem(fact, self.config.expiry_ms is not None) for fact in facts}:
            if problem:
                self.context.logger.warning("%s", problem)

    async def _write_manifest(self) -> None:
        name = self._names.manifest
        exchange = Exchange(name, [command(b"SET", name, self._manifest)])
        await self._commands.run([exchange])
        error = _error(exchange.outcome)
        # The tier stays usable: loads work on a full server, and on a Cluster's other nodes.
        is_harmless = isinstance(error, TierCapacityError) or (
            self._route.is_cluster and isinstance(error, TierUnavailableError)
        )
        if is_harmless:
            self.context.logger.warning("the manifest was not written: %s", error)
        elif error is not None:
            raise error

    async def _explained(self, error: TierError) -> TierError:
        """Return the error to raise for a failed open, with advice if an option can fix it."""
        if not error.retryable:
            return error
        mismatch = await self._connector.tls_mismatch()
        if mismatch is not None:
            return mismatch
        # Suggest a certificate, because a reset can arrive before the alert that requests one.
        if self.config.tls and self.config.tls_cert is None and was_reset(error):
            return TierUnavailableError(
                f"{error}; if the server wants a certificate, give options 'tls_cert' and 'tls_key'"
            )
        return error


def _error(outcome: Reply | TierError | None) -> TierError | None:
    return outcome if isinstance(outcome, TierError) else None


def _not_loaded(outcome: Reply | TierError | None, transfer: Transfer) -> TierError | None:
    """Return the error that made a load fail; ``None`` if the chunk was loaded."""
    if not isinstance(outcome, Reply):
        return outcome
    if outcome.kind is Kind.ABSENT:
        return ChunkNotFoundError("no such chunk")
    try:
        transfer.received(int(outcome.text))
    except CorruptChunkError as damage:
        return damage.detached()
    return None


def _limit_problem(facts: Mapping[str, Any], has_ttl: bool) -> str | None:
    """Return a warning if the server has no memory limit or evicts no chunks, else ``None``."""
    if "maxmemory" not in facts:
        return None
    policy = str(facts.get("maxmemory_policy"))
    if not facts["maxmemory"]:
        if has_ttl:
            return None
        return f"the server has no memory limit, so chunks fill its machine; {_LIMIT_ADVICE}"
    if policy == "noeviction" or (policy.startswith("volatile-") and not has_ttl):
        return (
            f"the server evicts no chunk (maxmemory-policy {policy}), so stores fail once it is "
            f"full; {_LIMIT_ADVICE}"
        )
    return None
