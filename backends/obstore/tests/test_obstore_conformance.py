"""The obstore tier meets the contract over each service's protocol."""

from __future__ import annotations

import hashlib
import json
from urllib.parse import quote, urlencode

import obstore
import pytest
from obstore.store import GCSStore, S3Store
from support.azurite import ACCOUNT, CONTAINER, KEY, Azurite
from support.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

from kvtier_sdk.testing import TierConformance

#: A Google account for a server that accepts requests without a token.
ANONYMOUS = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}


class OverAService(TierConformance):
    """The conformance kit's hooks. A subclass sets ``server`` and ``client``."""

    __test__ = False
    sequences = 5

    def _name(self, key):
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"chunks/{self.namespace.fingerprint}/{shard}/{key.hex()}.kv"

    def read_raw(self, key):
        try:
            return bytes(obstore.get(self.client, self._name(key)).bytes())
        except FileNotFoundError:
            return None

    def write_raw(self, key, data):
        obstore.put(self.client, self._name(key), data, use_multipart=False)

    def break_connection(self):
        self.server.kill()

    def restore_connection(self):
        self.server.start()


class TestS3(OverAService):
    __test__ = True
    # rclone writes objects in place, so a load during a store can return half of the chunk.
    test_any_sequence_of_calls = None
    test_no_partly_written_object_is_visible = None

    @pytest.fixture
    def tier(self, s3):
        self.server = s3
        self.client = S3Store("kv", config=self._settings(), client_options={"allow_http": True})
        yield self._url("kv")
        s3.start() if s3.pid is None else None

    def bad_settings(self):
        return {
            "no such bucket": self._url("absent"),
            "a wrong secret": self._url("kv", secret_access_key="wrong"),
            "an unknown setting": {**self._options("kv"), "settings": {"colour": "red"}},
            "no such file": self._url("kv", tls_ca="/nowhere/ca.pem"),
        }

    def _settings(self):
        return {
            "endpoint": self.server.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    def _options(self, bucket):
        return {
            "type": "obstore",
            "service": "s3",
            "bucket": bucket,
            "prefix": "chunks",
            **self._settings(),
        }

    def _url(self, bucket, **options):
        given = {"service": "s3", **self._settings(), **options}
        return f"obstore://{bucket}/chunks?{urlencode(given, quote_via=quote)}"


@pytest.mark.skipif(Azurite.program() is None, reason="azurite is not installed: make azurite")
class TestAzure(OverAService):
    __test__ = True

    @pytest.fixture
    def tier(self, azurite):
        self.server, self.client = azurite, azurite.store()
        yield self._url()
        azurite.start() if azurite.pid is None else None

    def bad_settings(self):
        return {
            "no such container": self._url("absent"),
            "a wrong key": self._url(account_key="QUJD"),
            "a key in another alphabet": self._url(account_key="!"),
        }

    def _url(self, container=CONTAINER, **options):
        given = {"endpoint": self.server.endpoint, "account_name": ACCOUNT, "account_key": KEY}
        return f"az://{container}/chunks?{urlencode({**given, **options}, quote_via=quote)}"


class TestGoogle(OverAService):
    """The S3 server implements enough of Google's XML protocol."""

    __test__ = True
    # Omit the tests that TestS3 omits, because the server is the same.
    test_any_sequence_of_calls = None
    test_no_partly_written_object_is_visible = None

    @pytest.fixture
    def tier(self, google):
        self.server = google
        self.client = GCSStore("kv", config=self._settings(), client_options={"allow_http": True})
        yield self._options("kv")
        google.start() if google.pid is None else None

    def bad_settings(self):
        return {
            "no such bucket": self._options("absent"),
            "a broken key": self._options("kv") | {"service_account_key": "garbage"},
        }

    def _options(self, bucket):
        place = {"type": "obstore", "service": "gs", "bucket": bucket, "prefix": "chunks"}
        return {**place, **self._settings()}

    def _settings(self):
        key = {"gcs_base_url": self.server.endpoint, **ANONYMOUS}
        return {"service_account_key": json.dumps(key)}
