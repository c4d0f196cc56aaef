"""Options of the S3 tier."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import quote, urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvtier_sdk import BoundedTierConfig, ConfigError, Count, Flag, Seconds, TierURL

_KEY_BYTES = 32
# Accept all bucket names that botocore accepts, because not every service follows AWS's rules.
# Refuse the access points of Outposts and Object Lambda, and multi-region access points, because
# their requests need other signatures.
_BUCKET = re.compile(
    r"[A-Za-z0-9._-]{1,255}"
    r"|arn:aws[a-z-]*:s3:[a-z0-9-]+:[0-9]{12}:accesspoint[/:][A-Za-z0-9-]+"
)
#: Error texts about an endpoint that is set in the options or in the settings of AWS tools.
NEEDS_TLS = "option 'sse_secret_key' cannot be sent to an endpoint without TLS"
NAMES_A_USER = (
    "it cannot hold a user or a password; give options 'access_key_id' and 'secret_access_key'"
)
#: Options whose values go into requests' signatures or headers.
_IN_HEADERS = ("access_key_id", "secret_access_key", "session_token", "region", "sse_kms_key_id")
#: The end of an error text about an option, or about credentials from another source.
NOT_IN_HEADER = (
    "contains a character that a header cannot hold: a line break, a control character or a "
    "character outside of ASCII; a file's last line break is often copied with a key"
)


def fits_in_header(text: str) -> bool:
    """Return true if a string is printable ASCII, which cannot inject another header."""
    return text.isascii() and text.isprintable()


def _bucket(value: object) -> str:
    if isinstance(value, str) and _BUCKET.fullmatch(value):
        return value
    raise ValueError(
        f"{value!r} is not a bucket; write its name alone, of letters, digits, '.', '-' and '_', "
        "or the ARN of an access point in one region (arn:aws:s3:region:account:accesspoint/name)"
    )


def _endpoint(value: object) -> str:
    if isinstance(value, str):
        if "@" in value:
            raise ValueError(NAMES_A_USER)
        try:
            parts = urlsplit(value)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return value.rstrip("/")
        except ValueError:
            pass
    raise ValueError(
        f"{value!r} is not an endpoint; write for example 'https://s3.example.com:9000'"
    )


def _prefix(value: object) -> str:
    if not isinstance(value, str) or any(part in (".", "..") for part in value.split("/")):
        raise ValueError(f"{value!r} should be text in which no part is '.' or '..'")
    return value.strip("/")


class S3TierConfig(BoundedTierConfig):
    """Options of the S3 tier.

    If the options give no credentials, region or endpoint, the tier looks where AWS tools look: in
    the environment, in ``~/.aws``, and at the metadata service of the machine or container.

    A bucket does not record when an object was read. So chunks expire by ``max_age`` and not by
    ``ttl``, and ``capacity`` evicts the oldest chunks first. A sweep at intervals enforces both.

    Attributes:
        ttl_s: refused, because a bucket does not record the last use; set ``max_age``.
        max_age_s: age at which a chunk is deleted, counted from its store; by default, never.
        bucket: name of the bucket, or ARN of an access point in one region; the bucket must exist.
        prefix: prefix of all object names, without slashes at its ends.
        endpoint: URL of a service other than AWS.
        region: the bucket's region; ``us-east-1`` if the settings of AWS tools name none.
        access_key_id: access key id of explicit credentials; treated as a secret, so that its file
            and the file of the secret access key are reread together.
        secret_access_key: secret access key of explicit credentials.
        session_token: session token of explicit credentials that are temporary.
        profile: the profile of ``~/.aws`` to use.
        addressing: ``path`` puts the bucket's name into the URL's path, ``virtual`` into the host
            name; ``auto`` chooses by the endpoint.
        sse: how the server encrypts objects; by default, as the bucket specifies.
        sse_kms_key_id: the key for ``aws:kms``; by default, the account's default key.
        sse_secret_key: customer-provided key (SSE-C), 32 bytes in base64.
        conditional_put: whether a store leaves an existing object unchanged, if the server supports
            ``If-None-Match``. A chunk that failed to load is replaced in any case.
        sign_payload: whether the signature covers the payload too, for servers that require it;
            this costs a SHA-256 of each chunk.
        connections: maximum number of connections for chunks, each for one chunk at a time. Stores
            use at most half of the connections; if there is only one, stores use it too.
        lookup_connections: maximum number of connections for lookups, each for one chunk at a time.
        connect_timeout_s: time limit for making a connection.
        read_timeout_s: time without a byte after which a request fails.
        sweep_interval_s: time between two sweeps, which enforce ``capacity`` and ``max_age``.
        tls_ca: file with the trusted certificates; by default, the system's certificates.
        tls_verify: whether to check the server's certificate and name.
    """

    bucket: Annotated[str, BeforeValidator(_bucket)]
    prefix: Annotated[str, BeforeValidator(_prefix)] = "kvtier"
    endpoint: Annotated[str | None, BeforeValidator(_endpoint)] = None
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    profile: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    sse: Literal["AES256", "aws:kms"] | None = None
    sse_kms_key_id: str | None = None
    sse_secret_key: SecretStr | None = None
    conditional_put: Flag = True
    sign_payload: Flag = False
    connections: Count = Field(8, ge=1, le=1024)
    lookup_connections: Count = Field(32, ge=1, le=1024)
    connect_timeout_s: Seconds = Field(2.0, alias="connect_timeout", gt=0)
    read_timeout_s: Seconds = Field(3.0, alias="read_timeout", gt=0)
    sweep_interval_s: Seconds = Field(600.0, alias="sweep_interval", gt=0)
    tls_ca: str | None = None
    tls_verify: Flag = True

    refuses: ClassVar[Mapping[str, str]] = {
        "min_free": "a bucket has no free space to keep; write 'capacity'"
    }
    needs = (
        ("access_key_id", "secret_access_key"),
        ("secret_access_key", "access_key_id"),
        ("session_token", "access_key_id"),
    )
    excludes = (
        ("profile", "access_key_id"),
        ("sse", "sse_secret_key"),
    )

    @model_validator(mode="after")
    def _check_no_ttl(self) -> Self:
        if self.ttl_s is not None:
            raise ValueError(
                "option 'ttl' counts from a chunk's last use, which a bucket does not know; write "
                "'max_age', which counts from its store"
            )
        return self

    @model_validator(mode="after")
    def _check_headers(self) -> Self:
        for name in _IN_HEADERS:
            value = getattr(self, name)
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if text is not None and not fits_in_header(text):
                raise ValueError(f"option {name!r} {NOT_IN_HEADER}")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.sse_kms_key_id and self.sse != "aws:kms":
            raise ValueError("option 'sse_kms_key_id' is given without 'sse' being 'aws:kms'")
        if self.sse_secret_key is not None:
            self._check_own_key(self.sse_secret_key.get_secret_value())
        return self

    def _check_own_key(self, key: str) -> None:
        try:
            is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
        except binascii.Error:
            is_key = False
        if not is_key:
            raise ValueError(
                f"option 'sse_secret_key' should be {_KEY_BYTES} bytes in base64; "
                "'openssl rand -base64 32' makes some"
            )
        if self.endpoint is not None and urlsplit(self.endpoint).scheme == "http":
            raise ValueError(NEEDS_TLS)

    @property
    def write_headers(self) -> dict[str, str]:
        """Encryption headers of a request that writes an object."""
        headers = {
            "x-amz-server-side-encryption": self.sse,
            "x-amz-server-side-encryption-aws-kms-key-id": self.sse_kms_key_id,
        }
        return {name: value for name, value in headers.items() if value} | self.read_headers

    @property
    def read_headers(self) -> dict[str, str]:
        """Encryption headers of a request for an existing object."""
        if self.sse_secret_key is None:
            return {}
        key = self.sse_secret_key.get_secret_value()
        digest = hashlib.md5(base64.b64decode(key), usedforsecurity=False).digest()
        start = "x-amz-server-side-encryption-customer"
        return {
            f"{start}-algorithm": "AES256",
            f"{start}-key": key,
            f"{start}-key-md5": base64.b64encode(digest).decode(),
        }

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Read the options in a URL such as ``s3://bucket/prefix?region=eu-west-1``."""
        if url.port is not None:
            raise ConfigError(
                f"{url.scheme}: a bucket has no port; write "
                f"'{url.scheme}://bucket/prefix?endpoint=http://host:port'"
            )
        given: dict[str, Any] = {
            "bucket": url.host,
            "prefix": url.path.strip("/") or None,
            "access_key_id": url.username or None,
            "secret_access_key": url.password,
        }
        return url.options_beside(given)

    def location(self) -> str:
        """Return the service, the bucket and the prefix as a URL."""
        return f"s3://{quote(self.endpoint or '', '')}/{self.bucket}/{self.prefix}"
