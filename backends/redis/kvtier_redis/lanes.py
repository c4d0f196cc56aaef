"""A few connections to each server, made when needed, kept while they are sound."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvtier_redis.answers import Kind, command
from kvtier_redis.config import HostPort, RedisTierConfig
from kvtier_redis.faults import answer_error, translated
from kvtier_redis.wire import Wire
from kvtier_sdk import Clock, ConfigError, TierTimeoutError

#: A server: host and port, or the path of its socket.
Address = HostPort | str

_CLOSED = "the tier was closed"


def tls_context(config: RedisTierConfig) -> ssl.SSLContext | None:
    """What the options say about TLS.

    Args:
        config: the options.

    Returns:
        The context, or ``None`` where TLS is not spoken.

    Raises:
        ConfigError: a file cannot be read or holds no certificate.
    """
    if not config.tls:
        return None
    option = "tls_ca"
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            option = "tls_cert"
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(f"option {option!r}: cannot be used: {reason}") from None
    if not config.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Dialler:
    """Makes connections that are ready for chunks: signed in, the database chosen.

    Args:
        config: the options.
        clock: bounds the time.
    """

    def __init__(self, config: RedisTierConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._tls = tls_context(config)

    async def dial(self, address: Address) -> Wire:
        """Connect to a server.

        Args:
            address: the server.

        Returns:
            A usable connection.

        Raises:
            TierError: it cannot be reached in time, or refuses.
        """
        timeout_s = self._config.connect_timeout_s
        peer = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        wire = Wire(peer)
        try:
            with translated():
                async with self._clock.timeout(timeout_s):
                    await self._connect(wire, address)
                    await self._sign_in(wire)
        except TierTimeoutError:
            wire.close("it took too long to be made")
            raise TierTimeoutError(f"no connection to {peer} within {timeout_s:g} s") from None
        except BaseException:
            wire.close("it could not be made")
            raise
        return wire

    async def _connect(self, wire: Wire, address: Address) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(address, str):
            await loop.create_unix_connection(lambda: wire, address)
            return
        host, port = address
        transport, _ = await loop.create_connection(lambda: wire, host, port, ssl=self._tls)
        # A peer that is gone without a word is noticed, if late.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def _sign_in(self, wire: Wire) -> None:
        config = self._config
        steps = []
        if config.password is not None:
            user = [config.username.encode()] if config.username else []
            steps.append(command(b"AUTH", *user, config.password.get_secret_value().encode()))
        if config.db:
            steps.append(command(b"SELECT", b"%d" % config.db))
        for step in steps:
            answer = await wire.call([step])
            if answer.kind is Kind.ERROR:
                raise answer_error(answer.text)


class Lanes:
    """Up to so many connections to one server, lent one request at a time.

    Args:
        dial: makes a connection.
        limit: how many there are at once.
    """

    def __init__(self, dial: Callable[[], Awaitable[Wire]], limit: int) -> None:
        self._dial = dial
        self._free = asyncio.Semaphore(limit)
        # The one that was used last goes first: it is the one least likely to be stale.
        self._idle: list[Wire] = []
        self._is_closed = False

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[Wire]:
        """Borrow a connection, waiting for one where all are lent.

        Yields:
            A usable connection, which comes back unless it broke.

        Raises:
            TierError: none could be made.
        """
        async with self._free:
            wire = self._take() or await self._dial()
            try:
                yield wire
            finally:
                if self._is_closed:
                    wire.close(_CLOSED)
                elif wire.is_usable:
                    self._idle.append(wire)

    def _take(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.is_usable:
                return wire
        return None

    def close(self) -> None:
        """Cut the connections, those that are lent when they come back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close(_CLOSED)
