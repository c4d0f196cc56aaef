"""Connections to the server, in the clear or through TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl

from kvtier_s3.config import S3TierConfig
from kvtier_s3.wire import Wire
from kvtier_sdk import Clock, ConfigError, TierTimeoutError, TierUnavailableError

# OpenSSL's codes for a certificate without the name, or the address, that was asked for.
_OTHER_NAME = (62, 64)


def tls_context(config: S3TierConfig, ca_file: str | None) -> ssl.SSLContext:
    """What the options say about TLS.

    Args:
        config: the options.
        ca_file: file with the certificates to trust; the system's where absent.

    Returns:
        The context.

    Raises:
        ConfigError: the file cannot be read or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(f"option 'tls_ca': {ca_file} cannot be used: {reason}") from None
    if not config.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _without_tls(peer: str, error: ssl.SSLError) -> TierUnavailableError:
    """Why TLS was not agreed on. What the options would have to mend is not tried again."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            text = (
                f"the certificate of {peer} is for another host; name that one in option "
                "'endpoint', try 'path' for 'addressing', or switch the check off with 'tls_verify'"
            )
        else:
            text = (
                f"the certificate of {peer} is not trusted: {error.verify_message}; option "
                "'tls_ca' names the certificates to trust, 'tls_verify' switches the check off"
            )
    elif error.reason == "WRONG_VERSION_NUMBER":
        text = f"{peer} does not speak TLS; write 'http://' in option 'endpoint', or another port"
    else:
        words = (error.reason or str(error)).lower().replace("_", " ")
        return TierUnavailableError(f"no TLS with {peer}: {words}")
    return TierUnavailableError(text, retryable=False)


class Dialler:
    """Makes connections to one server.

    Args:
        host: its name.
        port: its port.
        tls: how to speak TLS, or ``None``.
        config: the options.
        clock: bounds the time.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, config: S3TierConfig, clock: Clock
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._config = config
        self._clock = clock

    async def dial(self) -> Wire:
        """Connect.

        Returns:
            A usable connection.

        Raises:
            TierError: the server cannot be reached in time.
        """
        timeout_s = self._config.connect_timeout_s
        peer = f"{self._host}:{self._port}"
        wire = Wire(peer, self._clock, self._config.read_timeout_s)
        try:
            async with self._clock.timeout(timeout_s):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: wire, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            wire.close("it took too long to be made")
            raise TierTimeoutError(f"no connection to {peer} within {timeout_s:g} s") from None
        except ssl.SSLError as error:
            wire.close("it could not be made")
            raise _without_tls(peer, error) from None
        except OSError as error:
            wire.close("it could not be made")
            raise TierUnavailableError(
                f"no connection to {peer}: {error.strerror or error}"
            ) from None
        except BaseException:
            wire.close("it could not be made")
            raise
        # A peer that is gone without a word is noticed, if late.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return wire
