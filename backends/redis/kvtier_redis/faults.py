"""What servers answer and connections do, as the designed errors."""

from __future__ import annotations

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
    """An option cannot be right, as the server sees it: a :class:`ConfigError` where it opens."""


#: The first word of an answer to what it means here.
_WORDS: dict[str, type[TierError]] = {
    "OOM": TierCapacityError,
    **dict.fromkeys(("NOAUTH", "WRONGPASS", "NOPERM", "DENIED"), TierAuthError),
    # Each of these passes: a start, a failover, a script, a resharding, a disk that is full.
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
    # Somebody else's value under our key.
    "WRONGTYPE": CorruptChunkError,
}
#: Answers that begin with a plain ERR, by what they say.
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
            theirs.RedisClusterException,
            OSError,
        ),
        TierUnavailableError,
    ),
)
_NO_CLUSTER = ("MOVED", "ASK", "CROSSSLOT")
#: What a server says to whoever takes it for another, and what to do about it.
_SETTINGS = (
    (
        "cluster support disabled",
        "the server is no node of a cluster; leave out option 'cluster'",
    ),
    ("DB index is out of range", "the server has no database of that number; check option 'db'"),
    ("unknown command 'SENTINEL'", "the server is no Sentinel; leave out option 'sentinel'"),
    ("unknown command 'SET'", "the server is a Sentinel; option 'sentinel' names its service"),
)


# OpenSSL's codes for a certificate without the name, or the address, that was asked for.
_OTHER_NAME = (62, 64)

# RedisClusterException is no RedisError.
_THEIRS = (theirs.RedisError, theirs.RedisClusterException, OSError)


def reply_error(answer: str) -> TierError:
    """What an error answer of the server means.

    Args:
        answer: its text, without the leading ``-``.

    Returns:
        The designed error.
    """
    word = answer.partition(" ")[0]
    if word in _NO_CLUSTER:
        return SettingError("the server belongs to a cluster; set option 'cluster' to true")
    for phrase, advice in _SETTINGS:
        if phrase in answer:
            return SettingError(advice)
    kind = _WORDS.get(word)
    if kind is None:
        kind = next((kind for phrase, kind in _PHRASES if phrase in answer), TierError)
    return kind(f"the server answered: {answer}")


def client_error(error: Exception) -> TierError:
    """What an exception of redis-py or of the system means.

    Args:
        error: the exception.

    Returns:
        The designed error; one of no known kind is a plain :class:`TierError`.
    """
    if type(error) is theirs.ConnectionError and isinstance(error.__cause__, theirs.RedisError):
        # On a Unix socket redis-py wraps what the server answered to the first commands.
        error = error.__cause__
    refusal = _tls_refusal(error)
    if refusal is not None:
        return TierUnavailableError(refusal, retryable=False)
    if isinstance(error, theirs.RedisClusterException):
        # Around what the last node did, which tells more: that it is gone, or none of a cluster.
        reason = error.__cause__ or error.__context__
        if isinstance(reason, _THEIRS):
            return client_error(reason)
    if isinstance(error, theirs.AskError):  # MOVED too
        return reply_error("MOVED")
    for kinds, ours in _CLASSES:
        if isinstance(error, kinds):
            return ours(str(error) or type(error).__name__)
    if isinstance(error, theirs.ResponseError):
        return reply_error(str(error))
    return TierError(str(error) or type(error).__name__)


def _tls_refusal(error: BaseException | None) -> str | None:
    """Which options would make TLS work, where an exception rests on that; else ``None``."""
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
    """Raise what redis-py and the system raise as the designed errors.

    Raises:
        TierError: of the fitting class, with the original as its cause.
    """
    try:
        yield
    except (TierError, ConfigError):
        raise
    except _THEIRS as error:
        raise client_error(error) from error


def detached(error: TierError) -> TierError:
    """An error that is kept as a verdict, without the frames it was raised in.

    Those hold the buffers of the request.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
