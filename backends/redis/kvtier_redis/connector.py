"""Opens connections and prepares them: TLS, sign-in, and the choice of the database."""

from __future__ import annotations

import ssl
from contextlib import suppress

from kvtier_redis.config import HostPort, RedisTierConfig
from kvtier_redis.faults import reply_error, translated
from kvtier_redis.resp import Kind, call, command
from kvtier_sdk import (
    Clock,
    ConfigError,
    Connection,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)

#: A server: host and port, or the path of its socket.
Address = HostPort | str


def tls_context(config: RedisTierConfig) -> ssl.SSLContext | None:
    if not config.tls:
        return None
    option = "tls_ca"
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            option = "tls_cert"
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # includes SSLError
        reason = error.strerror
        if isinstance(error, ssl.SSLError):
            # If a certificate or a key is missing, OpenSSL's own reason is only "PEM lib".
            reason = "it contains no certificate"
            if option == "tls_cert" and config.tls_key is None:
                reason += ", or no key beside it; option 'tls_key' names a file with the key"
        raise ConfigError(f"option {option!r}: cannot be used: {reason}") from None
    if not config.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Connector:
    def __init__(self, config: RedisTierConfig, clock: Clock, *, touches: bool = True) -> None:
        self._config = config
        self._clock = clock
        self._touches = touches
        # A server before Redis 7.2 refuses CLIENT NO-TOUCH, and counts each read as a use.
        self.reads_are_uses = False
        self._tls = tls_context(config)

    async def connect(self, address: Address, *, is_for_chunks: bool = True) -> Connection:
        timeout_s = self._config.connect_timeout_s
        with translated():
            connection = await Connection.connect(
                address,
                clock=self._clock,
                timeout_s=timeout_s,
                tls=self._tls,
                stall_timeout_s=None if is_for_chunks else timeout_s,
            )
        try:
            async with self._clock.timeout(timeout_s):
                await self._sign_in(connection)
        except TimeoutError:
            raise TierTimeoutError(
                f"no reply from {connection.peer} within {timeout_s:g} s"
            ) from None
        except TierError as error:
            connection.close(str(error))
            raise
        return connection

    async def tls_mismatch(self) -> TierError | None:
        """Return an error if a server uses TLS but the options do not, or vice versa."""
        if self._config.socket is not None:
            return None
        if self._tls:
            speaks_other = self._speaks_plain
            text = "does not speak TLS; write 'redis:' for 'rediss:', or set option 'tls' to false"
        else:
            speaks_other = self._speaks_tls
            text = "speaks TLS; write 'rediss:' for 'redis:', or set option 'tls' to true"
        for host, port in self._config.seeds:
            with suppress(TierError, OSError):  # includes TimeoutError
                async with self._clock.timeout(self._config.connect_timeout_s):
                    if await speaks_other((host, port)):
                        return TierUnavailableError(f"{host}:{port} {text}", retryable=False)
        return None

    async def _speaks_tls(self, address: Address) -> bool:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            connection = await self._open(address, context)
        except ssl.SSLError as error:
            # Only a TLS server sends an alert, for example if it requires a client certificate.
            return "ALERT" in (error.reason or "")
        connection.close("it was an attempt")
        return True

    async def _speaks_plain(self, address: Address) -> bool:
        connection = await self._open(address, None)
        try:
            await connection.send([command(b"PING")])
            first = memoryview(bytearray(1))
            await connection.receive([first])
            return bytes(first) in (b"+", b"-")
        finally:
            connection.close("it was an attempt")

    async def _open(self, address: Address, tls: ssl.SSLContext | None) -> Connection:
        return await Connection.connect(
            address, clock=self._clock, timeout_s=self._config.connect_timeout_s, tls=tls
        )

    async def _sign_in(self, connection: Connection) -> None:
        config = self._config
        steps = []
        if config.password is not None:
            user = [config.username.encode()] if config.username else []
            steps.append([b"AUTH", *user, config.password.get_secret_value().encode()])
        if config.db or not steps:
            # Without a password, send SELECT even for database 0, because only a reply shows that
            # the server works. The kernel accepts connections even for a server that hangs.
            steps.append([b"SELECT", b"%d" % config.db])
        for step in steps:
            reply = await call(connection, *step)
            if reply.kind is Kind.ERROR:
                raise reply_error(reply.text)
        if not self._touches:
            reply = await call(connection, b"CLIENT", b"NO-TOUCH", b"ON")
            self.reads_are_uses |= reply.kind is Kind.ERROR
