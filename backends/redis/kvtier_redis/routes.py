"""Routes to a chunk's server: one server, the master of a Sentinel group, or a Cluster's node."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import SecretStr
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ResponseError

from kvtier_redis.config import RedisTierConfig
from kvtier_redis.connector import Address
from kvtier_redis.faults import SettingError, translated
from kvtier_sdk import Clock, TierAuthError, TierError, TierUnavailableError, check_any_answered

_SCAN_COUNT = 1000
_MOST_VALUE_BYTES = 1 << 20
_FIND_PAUSE_S = 0.25

T = TypeVar("T")


class Route(ABC):
    """The way to each key's server. A route also makes all requests that use redis-py."""

    is_cluster = False  # true if servers redirect requests

    def __init__(self, client: Any) -> None:
        self._client = client

    @abstractmethod
    def server_of(self, name: bytes) -> Address:
        """Return the last known server of a key."""

    def suspect(self) -> None:
        """Start a background search for the servers, if their addresses can change."""
        return

    @abstractmethod
    def _servers(self) -> Sequence[Any]:
        """Return redis-py's clients for the known servers that store chunks."""

    async def open(self) -> None:
        with translated():
            await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()

    async def names(self, pattern: bytes) -> AsyncIterator[bytes]:
        """Iterate over the matching string keys on all servers; a key may occur twice."""
        # Scan only strings, because other applications may have lists and hashes with this prefix.
        rest = ("MATCH", pattern, "COUNT", _SCAN_COUNT, "TYPE", "string")
        for server in self._servers():
            cursor = None
            while cursor != 0:
                with translated():
                    cursor, names = await server.execute_command("SCAN", cursor or 0, *rest)
                for name in names:
                    yield name

    async def value(self, name: bytes) -> bytes | None:
        """Return the beginning of a value; ``None`` if the value is empty or absent."""
        with translated():
            try:
                value: bytes = await self._client.getrange(name, 0, _MOST_VALUE_BYTES)
            except ResponseError as error:
                # Another application has a list or a hash of this name, so our value is absent.
                if not str(error).startswith("WRONGTYPE"):
                    raise
                return None
        return value or None

    async def facts(self) -> list[dict[str, Any]]:
        """Return each replying server's ``INFO``, or an empty dictionary if the server refuses."""
        return await self._ask_each(_info)

    async def key_count(self) -> int:
        return sum(await self._ask_each(lambda server: server.execute_command("DBSIZE")))

    async def _ask_each(self, ask: Callable[[Any], Awaitable[T]]) -> list[T]:
        """Return the servers' replies; raise an error if no server replies."""
        outcomes: list[T | TierError] = []
        for server in self._servers():
            try:
                with translated():
                    outcomes.append(await ask(server))
            except TierError as error:
                outcomes.append(error)
        check_any_answered(outcomes)
        return [outcome for outcome in outcomes if not isinstance(outcome, TierError)]


async def _info(server: Any) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = await server.execute_command("INFO")
    except ResponseError:
        return {}
    return facts


class _Moving(Route):
    """A route to servers that may move. It uses the last known addresses during a search."""

    def __init__(self, client: Any, clock: Clock) -> None:
        super().__init__(client)
        self._clock = clock
        self._is_in_doubt = False
        self._search: asyncio.Task[None] | None = None

    @abstractmethod
    async def _find(self) -> None:
        """Update the known addresses of all servers."""

    def suspect(self) -> None:
        self._is_in_doubt = True
        if self._search is None or self._search.done():
            self._search = self._clock.spawn(self._search_again(), name="search for chunks")

    async def _search_again(self) -> None:
        while self._is_in_doubt:
            self._is_in_doubt = False
            with suppress(TierError):
                await self._find()
            # Pause, because every batch requests a search while a server is down.
            await self._clock.sleep(_FIND_PAUSE_S)

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        await super().close()


class OneServer(Route):
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

    def _servers(self) -> Sequence[Any]:
        return [self._client]


class BehindSentinel(_Moving):
    """A route to the master that the Sentinels name. A failover changes the master."""

    def __init__(self, config: RedisTierConfig, clock: Clock) -> None:
        assert config.sentinel is not None
        self._service = config.sentinel
        sign_in = _sign_in(config.sentinel_username, config.sentinel_password)
        options = _connection_options(config)
        self._sentinel: Any = _Sentinels(  # type: ignore[no-untyped-call]
            config.seeds, sentinel_kwargs={**options, **sign_in}, db=config.db, **options
        )
        super().__init__(self._sentinel.master_for(self._service), clock)

    def server_of(self, name: bytes) -> Address:
        master: Address | None = self._sentinel.master
        if master is None:
            raise TierError("the master is not known", retryable=True)
        return master

    def _servers(self) -> Sequence[Any]:
        return [self._client]

    async def _find(self) -> None:
        with translated():
            await self._sentinel.find_master(self._service)

    async def close(self) -> None:
        await super().close()
        for sentinel in self._sentinel.sentinels:
            await sentinel.aclose()


class _Sentinels(Sentinel):
    """A client of the Sentinels. Its errors distinguish a refusal from an outage."""

    master: tuple[str, int] | None = None  # the last known master

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        # redis-py calls this method for each new connection. With the last known master, redis-py
        # can connect while no Sentinel answers. A failed request to the master starts a search.
        return self.master or await self.find_master(service_name)

    async def find_master(self, service_name: str) -> tuple[str, int]:
        failures: list[tuple[str, TierError]] = []
        # Iterate over a copy, because another search may change the list during the loop.
        for sentinel in list(self.sentinels):
            try:
                with translated():
                    masters: Any = await sentinel.sentinel_masters()
                    state = masters.get(service_name)
                    is_master = state and self.check_master_state(state, service_name)
            except TierError as error:
                asked = sentinel.connection_pool.connection_kwargs
                failures.append((f"{asked['host']}:{asked['port']}", error))
                continue
            if is_master:
                # Move this Sentinel to the front, so that the next search begins with it.
                self.sentinels.remove(sentinel)
                self.sentinels.insert(0, sentinel)
                self.master = state["ip"], state["port"]
                return self.master
            if state:
                place = f"{state['ip']}:{state['port']}"
                failures.append((place, TierUnavailableError("down, as a Sentinel sees it")))
        raise _no_master(service_name, failures)


def _no_master(service: str, failures: Sequence[tuple[str, TierError]]) -> TierError:
    """Return the error for a failed search; prefer an error that the operator can fix."""
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
    """A route that uses a Cluster's map of slots. A search reads the map again."""

    is_cluster = True

    def __init__(self, config: RedisTierConfig, clock: Clock) -> None:
        nodes = [ClusterNode(host, port) for host, port in config.seeds]
        super().__init__(RedisCluster(startup_nodes=nodes, **_connection_options(config)), clock)
        self._map = self._client.nodes_manager

    def server_of(self, name: bytes) -> Address:
        with translated():
            node = self._client.get_node_from_key(name)
        if node is None:
            raise TierError("no node of the cluster serves this chunk", retryable=True)
        return node.host, int(node.port)

    def _servers(self) -> Sequence[Any]:
        servers: Sequence[Any] = self._client.get_primaries()
        return servers

    async def _find(self) -> None:
        with translated():
            await self._map.initialize()

    async def open(self) -> None:
        # Request the map from any live node. The client's initialize() also contacts dead nodes.
        await self._find()

    async def close(self) -> None:
        await super().close()
        await self._map.aclose()
        await self._map.aclose("startup_nodes")


def open_route(config: RedisTierConfig, clock: Clock) -> Route:
    if config.cluster:
        return Cluster(config, clock)
    return BehindSentinel(config, clock) if config.sentinel else OneServer(config)


class _Credentials(CredentialProvider):
    """Reads the password for each new connection, because the password may change."""

    def __init__(self, username: str | None, password: SecretStr) -> None:
        self._username = username
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.get_secret_value()
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _sign_in(username: str | None, password: SecretStr | None) -> dict[str, Any]:
    return {"credential_provider": _Credentials(username, password) if password else None}


def _connection_options(config: RedisTierConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": config.connect_timeout_s,
        "socket_timeout": config.connect_timeout_s,
        # Retry once, because a server may close idle connections. The SDK makes all other retries.
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
