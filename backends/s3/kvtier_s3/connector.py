"""Opens connections to the server, with or without TLS."""

from __future__ import annotations

import ssl

from kvtier_s3.config import S3TierConfig
from kvtier_sdk import Clock, ConfigError, Connection, TierUnavailableError

# OpenSSL's codes for a certificate that names another host or another address.
_OTHER_NAME = (62, 64)


def tls_context(config: S3TierConfig, ca_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # includes SSLError
        reason = error.strerror or str(error)
        raise ConfigError(f"option 'tls_ca': {ca_file} cannot be used: {reason}") from None
    if not config.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _tls_error(peer: str, error: ssl.SSLError) -> TierUnavailableError:
    """Return the error for a failed handshake; not retryable if the options must change."""
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


async def connect(
    address: tuple[str, int], tls: ssl.SSLContext | None, config: S3TierConfig, clock: Clock
) -> Connection:
    try:
        return await Connection.connect(
            address,
            clock=clock,
            timeout_s=config.connect_timeout_s,
            tls=tls,
            stall_timeout_s=config.read_timeout_s,
        )
    except ssl.SSLError as error:
        raise _tls_error(f"{address[0]}:{address[1]}", error) from None
