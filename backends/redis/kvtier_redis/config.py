"""Options of the Redis tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import quote

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvtier_sdk import ConfigError, Count, ExpiringTierConfig, Flag, Seconds, TierURL

HostPort = tuple[str, int]

_BRACES = frozenset("{}")
# Separators in URLs and lists. Host names and addresses do not contain them.
_FOREIGN = frozenset("@/;, ")


def _host(value: object) -> object:
    # A single colon means that a port was appended, because an IPv6 address has at least two.
    if isinstance(value, str) and (not value or _FOREIGN & set(value) or value.count(":") == 1):
        # Do not show the value, because a URL given here by mistake may hold a password.
        raise ValueError("this is not a host's name or address; the port is option 'port'")
    return value


def _hosts(value: object) -> tuple[str, ...]:
    """Return the servers in a list, or in text such as ``"b:26379,c:26379"``."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{value!r} is not a list of servers; write for example 'b:26379,c:26379'")
    found = tuple(part.strip() for part in parts if part.strip())
    for part in found:
        # Without brackets, the last part of an IPv6 address would be mistaken for a port.
        if _FOREIGN & set(part) or part.rpartition("]")[2].count(":") > 1:
            raise ValueError("one is not a server; write for example 'b:26379,[::1]:26379'")
        split_host(part, default_port=1)
    return found


def split_host(text: str, *, default_port: int) -> HostPort:
    """Split ``host``, ``host:port`` or ``[address]:port``."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 2**16:
        raise ValueError(f"{text!r} is not a server; write for example 'b:26379'")
    return host, int(port)


def _prefix(value: object) -> str:
    # Braces in the prefix would put all chunks on one node: a cluster hashes only text in braces.
    if not isinstance(value, str) or not value or _BRACES & set(value):
        raise ValueError(f"{value!r} should be text without '{{' and '}}'")
    return value


class RedisTierConfig(ExpiringTierConfig):
    """Options of the Redis tier.

    Attributes:
        host: the server; a Sentinel if ``sentinel`` is set, any node if ``cluster`` is set.
        port: port at ``host``.
        hosts: more Sentinels or nodes, each ``host:port``, to ask if ``host`` cannot be reached;
            only with ``sentinel`` or ``cluster``.
        socket: path of a Unix socket, instead of ``host`` and ``port``.
        username: name of an ACL user; by default, the server's default user.
        password: password of that user.
        db: number of the database; a cluster has only database 0.
        prefix: prefix of all keys in Redis; tiers with different prefixes share no chunks.
        connections: maximum number of connections for chunks, per server; each connection loads one
            chunk at a time, or stores about 2 MiB of chunks at a time.
        connect_timeout_s: time limit for making a connection, and for requests that move no chunk.
        tls: whether to use TLS; a ``rediss:`` URL sets this option.
        tls_ca: file with the trusted certificates; by default, the system's certificates.
        tls_cert: file with this client's certificate, if the server requires a certificate.
        tls_key: file with the private key; if absent, ``tls_cert`` must contain the key.
        tls_verify: whether to check the server's certificate and name.
        sentinel: name of the service that the Sentinels at ``host`` and ``hosts`` monitor.
        sentinel_username: name of an ACL user of the Sentinels.
        sentinel_password: password of that user.
        cluster: whether the servers form a Cluster.
    """

    host: Annotated[str, BeforeValidator(_host)] = "127.0.0.1"
    port: Count = Field(6379, ge=1, le=65535)
    hosts: Annotated[tuple[str, ...], BeforeValidator(_hosts)] = ()
    socket: str | None = None
    username: str | None = None
    password: SecretStr | None = None
    db: Count = Field(0, ge=0, lt=2**31)
    prefix: Annotated[str, BeforeValidator(_prefix)] = "kvtier"
    connections: Count = Field(4, ge=1, le=1024)
    connect_timeout_s: Seconds = Field(2.0, alias="connect_timeout", gt=0)
    tls: Flag = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: Flag = True
    sentinel: str | None = None
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    cluster: Flag = False

    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("capacity", "min_free"),
        "the server keeps the limit, for all that share it; set 'maxmemory' and "
        "'maxmemory-policy allkeys-lru' there",
    )
    needs = (
        ("username", "password"),
        ("sentinel_username", "sentinel_password"),
        ("sentinel_password", "sentinel"),
        ("tls_ca", "tls"),
        ("tls_cert", "tls"),
        ("tls_key", "tls_cert"),
    )
    excludes = (
        ("sentinel", "cluster"),
        ("socket", "sentinel"),
        ("socket", "cluster"),
        ("socket", "tls"),
        ("db", "cluster"),
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.hosts and not (self.sentinel or self.cluster):
            raise ValueError("option 'hosts' is given without 'sentinel' or 'cluster'")
        return self

    @property
    def expiry_ms(self) -> int | None:
        """The time to live that a store sets, in milliseconds; ``None`` if chunks never expire."""
        return None if self.expiry_s is None else round(self.expiry_s * 1000)

    @property
    def young_ms(self) -> int | None:
        """The age in ms after which no use extends a chunk's expiry; ``None`` for no limit."""
        if self.max_age_s is None:
            return None
        return round((self.max_age_s - (self.ttl_s or self.max_age_s)) * 1000)

    @property
    def seeds(self) -> list[HostPort]:
        """The configured servers: ``host`` first, then ``hosts``."""
        more = [split_host(text, default_port=self.port) for text in self.hosts]
        return [(self.host, self.port), *more]

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Read the options in a URL such as ``redis://user:password@host:6379/0?ttl=1h``.

        The URL's path is the number of the database. ``rediss:`` switches TLS on. In a URL such as
        ``redis+unix:///run/redis.sock?db=1``, the path names the socket.
        """
        if any("@" in name for name in url.options):
            # Do not show the query. If a password contains "?", its end is in the query.
            raise ConfigError(f"{url.scheme}: write '%3F' for '?' in a user or a password")
        given: dict[str, Any] = {
            "username": url.username or None,
            "password": url.password,
            "host": url.host,
            "port": url.port,
        }
        if url.scheme == "redis+unix":
            if url.host is not None or not url.path:
                raise ConfigError(
                    f"{url.scheme}: takes a path; write 'redis+unix:///run/redis.sock'"
                )
            given["socket"] = url.path
        else:
            if url.path and url.host is None and not url.path.startswith("/"):
                raise ConfigError(
                    f"{url.scheme}: takes a host; write two slashes, as in 'redis://kv-1:6379'"
                )
            if db := url.path.strip("/"):
                # Do not show the path, because it may be a password if the URL lacks a slash.
                if not db.isdigit():
                    raise ConfigError(f"{url.scheme}: option 'db': the path is not a number")
                given["db"] = db
            if url.scheme == "rediss":
                given["tls"] = True
        return url.options_beside(given)

    def location(self) -> str:
        """Return the server, the database and the prefix as a URL."""
        server = quote(self.socket, "") if self.socket else f"{self.host}:{self.port}"
        return f"redis://{server}/{self.db}/{quote(self.prefix, '')}"
