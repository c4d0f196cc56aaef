"""Routes to the server that holds a chunk: one server, a Sentinel group, or a Cluster."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvtier_redis.config import RedisTierConfig
from kvtier_redis.connector import Address
from kvtier_redis.faults import SettingError, client_error, translated
from kvtier_sdk import Clock, TierAuthError, TierError, TierUnavailableError

_SCAN_COUNT = 1000
_FIND_PAUSE_S = 0.25
# redis-py takes a connection for each, and refuses when it has a hundred.
_RUNS_AT_ONCE = 16


class Route(ABC):
    """The way from a key to its server, and all commands that move no chunk.

    Attributes:
        is_cluster: whether servers redirect requests.
    """

    is_cluster = False

    def __init__(self, client: Any) -> None:
        self._client = client
        self._turns = asyncio.Semaphore(_RUNS_AT_ONCE)

    @abstractmethod
    def server_of(self, name: bytes) -> Address:
        """The server that holds a key, as far as is known.

        Raises:
            TierError: no server is known.
        """

    def suspect(self) -> None:
        """Report that a chunk was not where it should be: search again, in the background."""
        return

    async def open(self) -> None:
        """Connect and sign in.

        Raises:
            TierError: no server can be reached, or one refuses.
        """
        with translated():
            await self._client.ping()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def run(self, *commands: Sequence[str | bytes]) -> list[Any]:
        """Run commands on one key each, all in one go.

        Args:
            commands: the words of each; the key is the second.

        Returns:
            Their results, in order.

        Raises:
            TierError: one of them failed.
        """
        if not commands:
            return []
        try:
            with translated():
                async with self._turns, self._pipeline() as pipeline:
                    for words in commands:
                        pipeline.execute_command(*words)
                    results: list[Any] = await _execute(pipeline)
        except asyncio.CancelledError:
            self.suspect()
            raise
        for result in results:
            if isinstance(result, Exception):
                self.suspect()
                raise client_error(result)
        return results

    async def names(self, pattern: bytes) -> AsyncIterator[bytes]:
        """Iterate over the keys of strings that match, on all servers; one may come twice or more.

        Raises:
            TierError: while iterating, a server could not be asked.
        """
        with translated():
            # Lists and hashes of other applications below our prefix are no chunks.
            async for name in self._client.scan_iter(pattern, _SCAN_COUNT, "string"):
                yield name

    async def facts(self) -> list[dict[str, Any]]:
        """The reply to ``INFO`` of each server that holds chunks.

        Raises:
            TierError: a server could not be asked.
        """
        with translated():
            return [await self._client.info()]

    def _pipeline(self) -> Any:
        return self._client.pipeline(transaction=False)


async def _execute(pipeline: Any) -> list[Any]:
    try:
        results: list[Any] = await pipeline.execute(raise_on_error=False)
    except (RuntimeError, AttributeError) as error:
        # redis-py goes on with a connection that another call has closed: uvloop refuses a closed
        # transport, or its reader is None. Neither error is one of redis-py's own.
        raise TierUnavailableError(f"a connection was cut: {error}") from error
    return results


class _Moving(Route):
    """A route whose servers change places.

    The last known places hold until others are found: the servers that know them may hang or be
    away, which is no reason to leave a server that is well.
    """

    def __init__(self, client: Any, clock: Clock) -> None:
        super().__init__(client)
        self._clock = clock
        self._is_in_doubt = False
        self._search: asyncio.Task[None] | None = None

    @abstractmethod
    async def _find(self) -> None:
        """Find the places of keys.

        Raises:
            TierError: no server knows them; those known before still hold.
        """

    def suspect(self) -> None:
        self._is_in_doubt = True
        if self._search is None or self._search.done():
            self._search = self._clock.spawn(self._search_again(), name="search for chunks")

    async def _search_again(self) -> None:
        while self._is_in_doubt:
            self._is_in_doubt = False
            with suppress(TierError):
                await self._find()
            # While a server is down every batch reports it, and a search costs something.
            await self._clock.sleep(_FIND_PAUSE_S)

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        await super().close()


class OneServer(Route):
    """A server that stands alone."""

    def __init__(self, config: RedisTierConfig) -> None:
        self._address: Address = config.socket or (config.host, config.port)
        place = (
            {"unix_socket_path": config.socket}
            if config.socket
            else {"host": config.host, "port": config.port}
        )
        super().__init__(Redis(**place, db=config.db, **_connection_options(config)))

    def server_of(self, name: bytes) -> Address:
        return self._address


class BehindSentinel(_Moving):
    """A master behind Sentinel, found again after a failover."""

    def __init__(self, config: RedisTierConfig, clock: Clock) -> None:
        assert config.sentinel is not None
        self._service = config.sentinel
        sign_in = _sign_in(config.sentinel_username, config.sentinel_password)
        options = _connection_options(config)
        self._sentinel: Any = _Sentinels(  # type: ignore[no-untyped-call]
            config.seeds,
            sentinel_kwargs={**options, "username": None, "password": None, **sign_in},
            db=config.db,
            **options,
        )
        super().__init__(self._sentinel.master_for(self._service), clock)

    def server_of(self, name: bytes) -> Address:
        master: Address | None = self._sentinel.master
        if master is None:
            raise TierError("the master is not known", retryable=True)
        return master

    async def _find(self) -> None:
        with translated():
            await self._sentinel.find_master(self._service)

    async def close(self) -> None:
        await super().close()
        for sentinel in self._sentinel.sentinels:
            await sentinel.aclose()


class _Sentinels(Sentinel):
    """Asks one Sentinel after the other, as redis-py does; but tells a refusal from an outage.

    Attributes:
        master: the last known.
    """

    master: tuple[str, int] | None = None

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        # redis-py calls this for each connection that it makes: with all Sentinels away, that would
        # be an outage. A request that fails at the master starts a search.
        return self.master or await self.find_master(service_name)

    async def find_master(self, service_name: str) -> tuple[str, int]:
        failures: list[tuple[str, TierError]] = []
        # A copy: another search may change the list while a Sentinel is asked.
        for sentinel in list(self.sentinels):
            try:
                masters: Any = await sentinel.sentinel_masters()
            except (RedisError, OSError) as error:
                asked = sentinel.connection_pool.connection_kwargs
                failures.append((f"{asked['host']}:{asked['port']}", client_error(error)))
                continue
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):
                # The next search asks it first.
                self.sentinels.remove(sentinel)
                self.sentinels.insert(0, sentinel)
                self.master = state["ip"], state["port"]
                return self.master
            if state:
                place = f"{state['ip']}:{state['port']}"
                failures.append((place, TierUnavailableError("down, as a Sentinel sees it")))
        raise _no_master(service_name, failures)


def _no_master(service: str, failures: Sequence[tuple[str, TierError]]) -> TierError:
    """Explain that no Sentinel names a master: errors that an operator can mend come first."""
    if not failures:
        return SettingError(f"no Sentinel knows {service!r}; check option 'sentinel'")
    for place, error in failures:
        if isinstance(error, TierAuthError):
            return TierAuthError(
                "a Sentinel refused; check options 'sentinel_username' and 'sentinel_password': "
                f"{place}: {error}"
            )
        if isinstance(error, SettingError):
            return error
    place, error = failures[-1]
    return TierUnavailableError(f"no master of {service!r} is known: {place}: {error}")


class Cluster(_Moving):
    """A Cluster, whose map is read again when it has changed."""

    is_cluster = True

    def __init__(self, config: RedisTierConfig, clock: Clock) -> None:
        nodes = [ClusterNode(host, port) for host, port in config.seeds]
        super().__init__(RedisCluster(startup_nodes=nodes, **_connection_options(config)), clock)

    def server_of(self, name: bytes) -> Address:
        with translated():
            node = self._client.get_node_from_key(name)
        if node is None:
            raise TierError("no node of the cluster serves this chunk", retryable=True)
        return node.host, int(node.port)

    async def _find(self) -> None:
        with translated():
            await self._client.nodes_manager.initialize()

    async def open(self) -> None:
        with translated():
            await self._client.initialize()
        await super().open()

    async def facts(self) -> list[dict[str, Any]]:
        with translated():
            return [await node.execute_command("INFO") for node in self._client.get_primaries()]

    def _pipeline(self) -> Any:
        return self._client.pipeline()


def open_route(config: RedisTierConfig, clock: Clock) -> Route:
    """Make the route that the options ask for; it is not connected yet."""
    if config.cluster:
        return Cluster(config, clock)
    return BehindSentinel(config, clock) if config.sentinel else OneServer(config)


def _sign_in(username: str | None, password: Any) -> dict[str, Any]:
    if password is None:
        return {}
    return {"username": username, "password": password.get_secret_value()}


def _connection_options(config: RedisTierConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": config.connect_timeout_s,
        "socket_timeout": config.connect_timeout_s,
        # Retries are the SDK's. One attempt more, for a connection that the server has closed
        # meanwhile.
        "retry": Retry(NoBackoff(), 1),
        **_sign_in(config.username, config.password),
    }
    if config.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": config.tls_ca,
            "ssl_certfile": config.tls_cert,
            "ssl_keyfile": config.tls_key or config.tls_cert,
            "ssl_cert_reqs": "required" if config.tls_verify else "none",
            "ssl_check_hostname": config.tls_verify,
        }
    return options
