"""Finds a bucket's credentials and address, and lists and deletes objects, through aiobotocore."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import InvalidRegionError
from botocore.loaders import create_loader
from botocore.utils import get_environ_proxies

from kvtier_s3.config import NAMES_A_USER, NEEDS_TLS, NOT_IN_HEADER, S3TierConfig, fits_in_header
from kvtier_s3.credentials import CurrentCredentials
from kvtier_s3.faults import NO_OBJECT, Faults, Refusal, refusal_in
from kvtier_sdk import Clock, ConfigError, TierAuthError, TierError

# S3's limit on the number of objects in one delete request.
_DELETE_BATCH = 1000
# The minimum read timeout for listings and deletions, which are slower than loads.
_LISTING_TIMEOUT_S = 20.0
_DEFAULT_REGION = "us-east-1"
_PORTS = {"http": 80, "https": 443}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a bucket. In a URL, an object's name follows ``path``."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str
    region: str

    @classmethod
    def of(cls, presigned_url: str, name: str) -> Place:
        """Parse a URL that botocore has presigned for the object ``name``."""
        parts = urlsplit(presigned_url)
        scope = parse_qs(parts.query)["X-Amz-Credential"][0].split("/")
        return cls(
            parts.scheme,
            parts.hostname or "",
            parts.port or _PORTS[parts.scheme],
            parts.netloc,
            parts.path.removesuffix(name),
            scope[-3],
        )


class StoredObject(NamedTuple):
    """An object in a listing. The last write's time comes first, so that objects sort by age."""

    modified_s: float
    name: str
    size_bytes: int


class Bucket:
    """A bucket, accessed through aiobotocore's client.

    Only requests for credentials, which go to other hosts, use the environment's proxies.
    """

    #: Set by :meth:`open`.
    place: Place
    #: File with the trusted certificates, if the options or the settings of AWS tools name one.
    ca_file: str | None

    def __init__(self, config: S3TierConfig, clock: Clock, logger: logging.Logger) -> None:
        self._config = config
        self._opened = AsyncExitStack()
        self._client: Any = None
        self._credentials = CurrentCredentials(config, clock, logger)
        self.faults = Faults(config.bucket, config.endpoint or "AWS", config.region or "")

    async def open(self) -> None:
        """Find the credentials and the bucket's address. Nothing is sent to the bucket."""
        config = self._config
        with self.faults.bringing_credentials():
            session = AioSession(profile=config.profile)
            data_path = session.get_config_variable("data_path")
            session.register_component("data_loader", _models(data_path))
            await self._credentials.open()
            session.register_component("credential_provider", self._credentials)
            self.ca_file = config.tls_ca or session.get_config_variable("ca_bundle")
            region = config.region or session.get_config_variable("region") or _DEFAULT_REGION
            try:
                self._client = await self._opened.enter_async_context(
                    session.create_client(
                        "s3",
                        region_name=region,
                        endpoint_url=config.endpoint,
                        verify=(self.ca_file or True) if config.tls_verify else False,
                        config=_client_config(config),
                    )
                )
            except InvalidRegionError as error:
                raise ConfigError(f"option 'region': {error}") from None
            except ValueError as error:  # botocore's error for an endpoint that it cannot parse
                raise ConfigError(f"option 'endpoint': {error}") from None
            url = await self._client.generate_presigned_url(
                "get_object", {"Bucket": config.bucket, "Key": "x"}
            )
        self.place = Place.of(url, "x")
        if "@" in self.place.authority:
            raise ConfigError(f"option 'endpoint': {NAMES_A_USER}")
        if config.sse_secret_key is not None and self.place.scheme != "https":
            raise ConfigError(NEEDS_TLS)
        server = f"{self.place.scheme}://{self.place.authority}"
        self.faults = Faults(config.bucket, server, self.place.region)

    async def close(self) -> None:
        await self._opened.aclose()

    @property
    def unused_proxy(self) -> str | None:
        """The name of the proxy variable that the tier ignores; ``None`` if no variable is set."""
        scheme = self.place.scheme
        has_proxy = scheme in get_environ_proxies(f"{scheme}://{self.place.authority}")
        return f"{scheme.upper()}_PROXY" if has_proxy else None

    async def credentials(self) -> ReadOnlyCredentials:
        """Return the current credentials; renew temporary credentials that expire soon."""
        with self.faults.bringing_credentials():
            found = await self._credentials.get_frozen_credentials()
        for name in ("access_key", "secret_key", "token"):
            if not fits_in_header(getattr(found, name) or ""):
                raise TierAuthError(f"the {name} that was found {NOT_IN_HEADER}")
        return found

    def refused(self, refusal: Refusal, *, of_object: bool = False) -> TierError:
        """Return the error for a refusal; if it is a TierAuthError, suspect the credentials."""
        error = self.faults.error(refusal, of_object=of_object)
        if isinstance(error, TierAuthError):
            self._credentials.suspect()
        return error

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Translate aiobotocore's errors; mark the credentials as suspect after a TierAuthError."""
        try:
            with self.faults.translated():
                yield
        except TierAuthError:
            self._credentials.suspect()
            raise

    def listing(self, start: str) -> AsyncIterator[StoredObject]:
        """List the objects whose names begin with a prefix, page by page."""
        return self._listed(
            lambda page: [
                StoredObject(found["LastModified"].timestamp(), found["Key"], found["Size"])
                for found in page.get("Contents", ())
            ],
            Prefix=start,
        )

    def directories(self, start: str) -> AsyncIterator[str]:
        """List the directories directly below a prefix, which S3 calls common prefixes."""
        return self._listed(
            lambda page: [found["Prefix"] for found in page.get("CommonPrefixes", ())],
            Prefix=start,
            Delimiter="/",
        )

    async def _listed(
        self, read: Callable[[Mapping[str, Any]], Iterable[T]], **query: str
    ) -> AsyncIterator[T]:
        await self.credentials()  # raises TierAuthError for unusable credentials
        with self._asking():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._config.bucket, **query
            )
            async for page in pages:
                for found in read(page):
                    yield found

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Absent objects are not an error."""
        await self.credentials()  # raises TierAuthError for unusable credentials
        for start in range(0, len(names), _DELETE_BATCH):
            objects = [{"Key": name} for name in names[start : start + _DELETE_BATCH]]
            with self._asking():
                response = await self._client.delete_objects(
                    Bucket=self._config.bucket, Delete={"Objects": objects, "Quiet": True}
                )
            errors = [
                self.refused(refusal_in({**response, "Error": error}), of_object=True)
                for error in response.get("Errors", ())
                if error.get("Code") not in NO_OBJECT
            ]
            if errors:
                # Prefer a permanent error, because no retry can fix it.
                raise min(errors, key=lambda error: error.retryable)


@functools.cache
def _models(data_path: str | None) -> Any:
    """Return a loader of botocore's models; caching it saves a tenth of a second per tier."""
    return create_loader(data_path)


def _client_config(config: S3TierConfig) -> AioConfig:
    return AioConfig(
        signature_version="s3v4",
        s3={"addressing_style": config.addressing},
        connect_timeout=config.connect_timeout_s,
        read_timeout=max(config.read_timeout_s, _LISTING_TIMEOUT_S),
        # Use no proxy. The value None would select the environment's proxies.
        proxies={},
        # botocore must not retry or add checksums, because the runner retries and checks digests.
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=4,
    )
