"""Connections that are ready for chunks: made in time, encrypted, signed in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from kvtier_redis.answers import Kind, command
from kvtier_redis.config import HostPort, RedisTierConfig
from kvtier_redis.faults import answer_error, translated
from kvtier_redis.wire import Wire
from kvtier_sdk import Clock, ConfigError, TierTimeoutError

#: A server: host and port, or the path of its socket.
Address = HostPort | str


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
        reason = error.strerror
        if isinstance(error, ssl.SSLError):
            # OpenSSL's own words are "PEM lib", of whatever it did not find in a file.
            reason = "it holds no certificate"
            if option == "tls_cert" and config.tls_key is None:
                reason += ", or no key beside it; option 'tls_key' names a file with the key"
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
        try:
            with translated():
                async with self._clock.timeout(timeout_s):
                    return await self._signed_in(Wire(await self._connect(address), peer))
        except TierTimeoutError:
            raise TierTimeoutError(f"no connection to {peer} within {timeout_s:g} s") from None

    async def _connect(self, address: Address) -> socket.socket:
        if isinstance(address, str):
            return await _connected(socket.AF_UNIX, address)
        host, port = address
        loop = asyncio.get_running_loop()
        failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        for family, *_, place in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                sock = await _connected(family, place)
            except OSError as error:
                failure = error
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that is gone without a word is noticed, if late.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock if self._tls is None else await _encrypted(sock, self._tls, host)
        raise failure

    async def _signed_in(self, wire: Wire) -> Wire:
        try:
            for step in self._steps():
                answer = await wire.call([step])
                if answer.kind is Kind.ERROR:
                    raise answer_error(answer.text)
        except BaseException:
            wire.close("it could not be made")
            raise
        return wire

    def _steps(self) -> list[bytes]:
        config = self._config
        steps = []
        if config.password is not None:
            user = [config.username.encode()] if config.username else []
            steps.append(command(b"AUTH", *user, config.password.get_secret_value().encode()))
        if config.db or not steps:
            # Where nothing has to be said all the same: the system accepts for a server that
            # hangs, and one that has too many clients says so only now.
            steps.append(command(b"SELECT", b"%d" % config.db))
        return steps


async def _connected(family: int, place: Any) -> socket.socket:
    """A socket that is connected to a place."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        failure = sock.connect_ex(place)
        if failure == errno.EINPROGRESS:
            await _until(loop.add_writer, loop.remove_writer, sock.fileno())
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
    except BaseException:
        sock.close()
        raise
    return sock


async def _encrypted(plain: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """The same connection, with TLS."""
    loop = asyncio.get_running_loop()
    sock = tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                await _until(loop.add_reader, loop.remove_reader, sock.fileno())
            except ssl.SSLWantWriteError:
                await _until(loop.add_writer, loop.remove_writer, sock.fileno())
            else:
                return sock
    except BaseException:
        sock.close()
        raise


async def _until(
    watch: Callable[..., object], unwatch: Callable[[int], object], descriptor: int
) -> None:
    """Wait until the event loop calls; when this returns or raises it watches no more."""
    called = asyncio.Event()
    watch(descriptor, called.set)
    try:
        await called.wait()
    finally:
        unwatch(descriptor)
