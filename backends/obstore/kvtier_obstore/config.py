"""The options of a bucket and its service, and their translation into obstore's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store
from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvtier_sdk import Count, Flag, Seconds, TierConfig, TierURL

_MAKERS: dict[str, Any] = {"gs": GCSStore, "az": AzureStore, "s3": S3Store}
#: The options of each service, with obstore's name if it is different.
_OPTIONS = {
    "gs": {"endpoint": "base_url", "service_account_key": ""},
    "az": {"endpoint": "", "account_name": "", "account_key": "", "sas_token": "sas_key"},
    "s3": dict.fromkeys(("endpoint", "region", "access_key_id", "secret_access_key"), ""),
}


def _text(pattern: str, kind: str) -> BeforeValidator:
    def check(value: object) -> str:
        if isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII):
            return value
        raise ValueError(f"{value!r} is not {kind}")

    return BeforeValidator(check)


# Allow only characters that all clients encode alike. No part of a path may be "." or "..".
_Bucket = Annotated[str, _text(r"[A-Za-z0-9][\w.-]*", "the name of a bucket or container")]
_Prefix = Annotated[str, _text(r"([\w~-][\w.~-]*(/(?!$)|$))*", "a prefix such as 'kv/llama'")]
_Endpoint = Annotated[str, _text(r"https?://[^/?#@]+(/[^?#@]*)?", "a URL such as 'https://host'")]


class ObstoreTierConfig(TierConfig):
    """Options of the obstore tier.

    Without credentials in the options, obstore looks for them in the environment (``AWS_*``,
    ``GOOGLE_*``, ``AZURE_*``), the application default credentials, and the machine's identity.

    Attributes:
        service: the object store: Google Cloud Storage, Azure Blob Storage, or S3.
        bucket: the bucket, or Azure's container, which must exist.
        prefix: prefix of all object names.
        endpoint: URL of another server that speaks the provider's protocol.
        region: the bucket's region, for S3.
        access_key_id: access key id, for S3; handled as a secret, and reread with the secret key.
        secret_access_key: secret access key, for S3.
        account_name: the storage account, for Azure.
        account_key: the account's key, for Azure.
        sas_token: a shared access signature, for Azure.
        service_account_key: a service account's key, as JSON, for Google.
        settings: further settings, under obstore's names. They must not contain secrets.
        conditional_put: true if a store overwrites an existing object only after a failed load of
            that object; false if a store always overwrites.
        connections: the maximum number of requests that a batch runs at once.
        connect_timeout_s: the time limit for making a connection.
        timeout_s: the time limit for a request, including the transfer of the chunk.
        tls_ca: a file of certificates to trust in addition to the system's.
        tls_verify: true if the server's certificate and name are checked.
    """

    service: Literal["gs", "az", "s3"]
    bucket: _Bucket
    prefix: _Prefix = "kvtier"
    endpoint: _Endpoint | None = None
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    account_name: str | None = None
    account_key: SecretStr | None = None
    sas_token: SecretStr | None = None
    service_account_key: SecretStr | None = None
    settings: dict[str, str] = Field(default_factory=dict)
    conditional_put: Flag = True
    connections: Count = Field(16, ge=1, le=1024)
    connect_timeout_s: Seconds = Field(2.0, alias="connect_timeout", gt=0)
    timeout_s: Seconds = Field(5.0, alias="timeout", gt=0)
    tls_ca: str | None = None
    tls_verify: Flag = True

    needs = (
        *(("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id")),
        *(("account_key", "account_name"), ("sas_token", "account_name")),
    )
    excludes = (("account_key", "sas_token"),)
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("capacity", "ttl", "max_age", "min_free"), "give the bucket a lifecycle rule in its place"
    )

    @model_validator(mode="after")
    def _check_service(self) -> Self:
        for name in set().union(*_OPTIONS.values()) - _OPTIONS[self.service].keys():
            if getattr(self, name) is not None:
                raise ValueError(f"option {name!r} is for another service than {self.service!r}")
        return self

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Parse a URL such as ``gs://bucket/prefix`` or ``obstore://bucket/prefix?service=s3``."""
        place = {"bucket": url.host, "prefix": url.path.strip("/") or None, "port": url.port}
        # A URL with a port, a user or a password is refused later, because no such options exist.
        place |= {"username": url.username, "password": url.password}
        if url.scheme != "obstore":
            place["service"] = url.scheme
        return url.options_beside(place)

    def location(self) -> str:
        """Return the service, the endpoint, the bucket and the prefix as a URL."""
        return f"{self.service}://{self.endpoint or ''}/{self.bucket}/{self.prefix}"

    def store_settings(self) -> dict[str, str]:
        """Return the settings in obstore's form, with the current secrets."""
        # Each chunk's header has a digest, so the request's signature need not cover the payload.
        settings = {"unsigned_payload": "true"} if self.service == "s3" else {}
        settings |= self.settings
        for name, theirs in _OPTIONS[self.service].items():
            value = getattr(self, name)
            if value is not None:
                secret = isinstance(value, SecretStr)
                settings[theirs or name] = value.get_secret_value() if secret else value
        return settings

    def make_store(self, settings: dict[str, str]) -> ObjectStore:
        """Return an obstore store that does not retry requests, because the SDK retries."""
        client: dict[str, Any] = {
            "allow_http": True,
            "allow_invalid_certificates": not self.tls_verify,
            "connect_timeout": f"{self.connect_timeout_s}s",
            "timeout": f"{self.timeout_s}s",
        }
        if self.tls_ca is not None:
            client["root_certificate"] = Path(self.tls_ca).read_bytes()
        options = {"client_options": client, "retry_config": {"max_retries": 0}}
        store: ObjectStore = _MAKERS[self.service](self.bucket, config=settings, **options)
        return store
