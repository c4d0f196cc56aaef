"""Signs requests about chunks with AWS Signature Version 4.

botocore's signer takes longer than all other work on a request. A test compares the signatures of
both signers.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping

from botocore.credentials import ReadOnlyCredentials

#: Replaces the hash of a payload that the signature does not cover.
UNSIGNED = "UNSIGNED-PAYLOAD"
#: The hash of an empty payload.
EMPTY = hashlib.sha256(b"").hexdigest()

_ALGORITHM = "AWS4-HMAC-SHA256"


class Signer:
    def __init__(self, host: str, region: str) -> None:
        self._host = host
        self._region = region
        # The latest secret and day, and the signing key that is derived from them.
        self._key: tuple[str, str, bytes] = ("", "", b"")

    def headers(
        self,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        payload_hash: str,
        credentials: ReadOnlyCredentials,
        now_s: float,
    ) -> dict[str, str]:
        """Sign a request; return its headers, including the signature."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
        day = moment[:8]
        signed = {
            "host": self._host,
            "x-amz-content-sha256": payload_hash,
            "x-amz-date": moment,
            **headers,
        }
        if credentials.token:
            signed["x-amz-security-token"] = credentials.token
        names = sorted(signed)
        listed = ";".join(names)
        lines = "\n".join([f"{name}:{signed[name]}" for name in names])
        request = f"{method}\n{path}\n{query}\n{lines}\n\n{listed}\n{payload_hash}"
        scope = f"{day}/{self._region}/s3/aws4_request"
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest}"
        key = self._key_of(credentials.secret_key, day)
        signature = _hmac(key, text).hex()
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={listed}, Signature={signature}"
        )
        return signed

    def _key_of(self, secret: str, day: str) -> bytes:
        known_secret, known_day, key = self._key
        if (known_secret, known_day) != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = _hmac(key, part)
            self._key = (secret, day, key)
        return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
