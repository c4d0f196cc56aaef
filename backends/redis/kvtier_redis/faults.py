"""Translates error replies and exceptions to the SDK's errors."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as theirs

from kvtier_sdk import (
    ConfigError,
    CorruptChunkError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)


class SettingError(TierError):
    """A server's reply that reveals a wrong option; ``open`` raises ``ConfigError`` instead."""


#: Error classes by the first word of an error reply.
_WORDS: dict[str, type[TierError]] = {
    "OOM": TierCapacityError,
    **dict.fromkeys(("NOAUTH", "WRONGPASS", "NOPERM", "DENIED"), TierAuthError),
    # Temporary states: startup, failover, resharding, a running script, or a full disk.
    **dict.fromkeys(
        (
            "LOADING",
            "READONLY",
            "MASTERDOWN",
            "CLUSTERDOWN",
            "TRYAGAIN",
            "BUSY",
            "MISCONF",
            "NOREPLICAS",
        ),
        TierUnavailableError,
    ),
    # Another application uses our key.
    "WRONGTYPE": CorruptChunkError,
}
#: Phrases in error replies that begin with a plain ERR.
_PHRASES: tuple[tuple[str, type[TierError]], ...] = (
    ("max number of clients", TierUnavailableError),
    ("invalid password", TierAuthError),
    ("without any password configured", TierAuthError),
)
_CLASSES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[TierError]], ...] = (
    (
        (
            theirs.AuthenticationError,
            theirs.AuthorizationError,
            theirs.AuthenticationWrongNumberOfArgsError,
            theirs.NoPermissionError,
        ),
        TierAuthError,
    ),
    (theirs.OutOfMemoryError, TierCapacityError),
    ((theirs.TimeoutError, TimeoutError), TierTimeoutError),
    (
        (
            theirs.ReadOnlyError,
            theirs.ClusterError,
            theirs.TryAgainError,
            theirs.ConnectionError,
            theirs.InvalidResponse,
            theirs.RedisClusterException,
            OSError,
        ),
        TierUnavailableError,
    ),
)
_NO_CLUSTER = ("MOVED", "ASK", "CROSSSLOT")
#: Phrases in error replies that show a wrong option, and the advice for each.
_SETTINGS = (
    (
        "cluster support disabled",
        "the server is not a node of a cluster; leave out option 'cluster'",
    ),
    ("DB index is out of range", "the server has no database of that number; check option 'db'"),
    ("unknown command 'SENTINEL'", "the server is not a Sentinel; leave out option 'sentinel'"),
    ("unknown command 'SET'", "the server is a Sentinel; option 'sentinel' names its service"),
)
# OpenSSL's codes for a certificate that names another host or another address.
_OTHER_NAME = (62, 64)

_UNREACHABLE = re.compile(r"Error -?\d+ connecting to (\S+)\. (.+?)\.?\Z")

# RedisClusterException does not derive from RedisError.
_THEIRS = (theirs.RedisError, theirs.RedisClusterException, OSError)
# redis-py raises these for malformed replies, and for connections that another call has closed.
_OF_REPLIES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def reply_error(text: str) -> TierError:
    word = text.partition(" ")[0]
    if word in _NO_CLUSTER:
        return SettingError("the server belongs to a cluster; set option 'cluster' to true")
    for phrase, advice in _SETTINGS:
        if phrase in text:
            return SettingError(advice)
    kind = _WORDS.get(word)
    if kind is None:
        kind = next((kind for phrase, kind in _PHRASES if phrase in text), TierError)
    return kind(f"the server answered: {text}")


def client_error(error: Exception) -> TierError:
    if type(error) is theirs.ConnectionError and isinstance(error.__cause__, theirs.RedisError):
        # On a Unix socket, redis-py wraps an error reply to its first commands in ConnectionError.
        error = error.__cause__
    refusal = _tls_refusal(error)
    if refusal is not None:
        return TierUnavailableError(refusal, retryable=False)
    if isinstance(error, theirs.RedisClusterException):
        # Only the wrapped error distinguishes an unreachable node from a node outside a cluster.
        reason = error.__cause__ or error.__context__
        if isinstance(reason, _THEIRS + _OF_REPLIES):
            return client_error(reason)
    if isinstance(error, theirs.AskError):  # includes MovedError
        return reply_error("MOVED")
    for kinds, ours in _CLASSES:
        if isinstance(error, kinds):
            return ours(_plain(str(error) or type(error).__name__))
    if isinstance(error, theirs.ResponseError):
        return reply_error(str(error))
    text = str(error) or type(error).__name__
    if isinstance(error, _OF_REPLIES):
        return TierUnavailableError(f"an invalid reply, or a cut connection: {text}")
    return TierError(text)


def _plain(text: str) -> str:
    """Reword a message of redis-py, and add advice if the cause is known."""
    unreachable = _UNREACHABLE.match(text)
    if unreachable is not None:
        address, reason = unreachable.groups()
        return f"no connection to {address}: {reason}; see that the server runs there"
    if text.startswith("invalid username-password pair"):
        return f"{text.rstrip('.')}; check options 'username' and 'password'"
    return text.rstrip(".")


def was_reset(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ConnectionResetError):
        error = error.__cause__ or error.__context__
    return error is not None


def _tls_refusal(error: BaseException | None) -> str | None:
    """Return advice for a TLS error that an option can fix; ``None`` for any other error."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            return (
                "the server's certificate is for another host; connect to that name, or switch "
                "the check off with option 'tls_verify'"
            )
        return (
            f"the server's certificate is not trusted: {error.verify_message}; option 'tls_ca' "
            "names the certificates to trust, 'tls_verify' switches the check off"
        )
    if error is not None and "CERTIFICATE_REQUIRED" in (error.reason or ""):
        return "the server wants a certificate; give options 'tls_cert' and 'tls_key'"
    return None


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except (TierError, ConfigError):
        raise
    except _THEIRS + _OF_REPLIES as error:
        raise client_error(error) from error
