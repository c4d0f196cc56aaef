"""Translates error responses and exceptions to the SDK's errors."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from botocore import exceptions as theirs
from botocore.parsers import ResponseParserError

from kvtier_s3.http import Response
from kvtier_sdk import (
    ChunkError,
    ConfigError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)


class SettingError(TierError):
    """A server's reply that reveals a wrong setting; ``open`` raises ``ConfigError`` instead."""


class ObjectDeniedError(ChunkError, TierAuthError):
    """Raised if the server denied access to an object, and may deny access to all objects."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal by the server. If the server sent no code, the status determines ``code``."""

    status: int
    code: str
    message: str
    region: str
    date: str


# Codes by status, for responses whose body has no code, such as responses to HEAD.
_CODES = {
    301: "PermanentRedirect",
    307: "TemporaryRedirect",
    400: "BadRequest",
    403: "AccessDenied",
    404: "NotFound",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    501: "NotImplemented",
    503: "ServiceUnavailable",
}
#: Codes for an absent object. After a write or a listing, they show that the server is not S3.
NO_OBJECT = frozenset({"NoSuchKey", "NotFound"})
# Codes for a bucket in another region or at another endpoint.
_ELSEWHERE = (
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraint",
    "IncorrectEndpoint",
    "PermanentRedirect",
    "TemporaryRedirect",
)
# Error classes by code, without the prefix "KMS." and the suffix "Exception".
_KINDS: dict[str, type[TierError]] = {
    **dict.fromkeys(
        (
            "AccessDenied",
            "AccountProblem",
            "AllAccessDisabled",
            "ExpiredToken",
            "InvalidAccessKeyId",
            "InvalidSecurity",
            "InvalidToken",
            "NotSignedUp",
            "RequestTimeTooSkewed",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
        ),
        TierAuthError,
    ),
    **dict.fromkeys(
        ("EntityTooLarge", "InsufficientCapacity", "QuotaExceeded", "XMinioStorageFull"),
        TierCapacityError,
    ),
    **dict.fromkeys(
        (
            "BandwidthLimitExceeded",
            "ConditionalRequestConflict",
            "IncompleteBody",
            "InternalError",
            "LimitExceeded",
            "OperationAborted",
            "RequestLimitExceeded",
            "RequestThrottled",
            "RequestTimeout",
            "ServiceUnavailable",
            "SlowDown",
            "Throttled",
            "Throttling",
            "TooManyRequests",
        ),
        TierUnavailableError,
    ),
    **dict.fromkeys(
        (*_ELSEWHERE, "InvalidBucketName", "NoSuchBucket", "XAmzContentSHA256Mismatch"),
        SettingError,
    ),
    # The object is archived.
    "InvalidObjectState": ChunkError,
}
_STATUSES: dict[int, type[TierError]] = {
    401: TierAuthError,
    403: TierAuthError,
    404: SettingError,
    408: TierUnavailableError,
    409: TierUnavailableError,
    429: TierUnavailableError,
    507: TierCapacityError,
}
_NO_S3 = (
    "what answers at {server} is not an S3 service, or not at this path; check option 'endpoint'"
)
_ADVICE = {
    "NoSuchBucket": (
        "bucket {bucket!r} does not exist at {server}; create it, or check option 'bucket'"
    ),
    "NoSuchKey": _NO_S3,
    "NotFound": _NO_S3,
    "InvalidObjectState": ("the chunk is archived; let the bucket's rules expire chunks instead"),
    "InvalidBucketName": "{bucket!r} is not a valid name of a bucket; check option 'bucket'",
    "RequestTimeTooSkewed": "this machine's clock is wrong, seen from the server{time}; set it",
    "InvalidAccessKeyId": "there is no such access key id; check option 'access_key_id'",
    "SignatureDoesNotMatch": (
        "the secret access key does not fit the access key id; check option 'secret_access_key'"
    ),
    "ExpiredToken": "the temporary credentials have expired",
    "XAmzContentSHA256Mismatch": (
        "the server wants payloads signed; set option 'sign_payload' to true"
    ),
}
_CLASSES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[Exception]], ...] = (
    (
        (
            theirs.ProfileNotFound,
            theirs.ConfigParseError,
            theirs.ConfigNotFound,
            theirs.ParamValidationError,
            theirs.InvalidRegionError,
            theirs.EndpointResolutionError,
            theirs.InvalidConfigError,
            theirs.UnknownCredentialError,
            theirs.UnknownEndpointError,
        ),
        ConfigError,
    ),
    (
        (
            theirs.NoCredentialsError,
            theirs.PartialCredentialsError,
            theirs.CredentialRetrievalError,
            theirs.SSOError,
            theirs.TokenRetrievalError,
        ),
        TierAuthError,
    ),
    ((theirs.ConnectTimeoutError, theirs.ReadTimeoutError, TimeoutError), TierTimeoutError),
    ((theirs.HTTPClientError, theirs.ConnectionError, OSError), TierUnavailableError),
)
_OF_CONTENT = (AttributeError, RuntimeError, TypeError, ValueError)
# botocore does not wrap errors of credential programs and files, such as invalid JSON.
_OF_CREDENTIALS = (*_OF_CONTENT, FileNotFoundError, PermissionError)
# botocore raises these for a malformed response. ResponseParserError is not a BotoCoreError.
_OF_RESPONSES = (*_OF_CONTENT, LookupError, ResponseParserError)


def refusal_of(response: Response) -> Refusal:
    text = response.body.decode(errors="replace")
    error = {name: _element(text, name) for name in ("Code", "Message", "Region")}
    metadata = {"HTTPStatusCode": response.status, "HTTPHeaders": response.headers}
    return refusal_in({"Error": error, "ResponseMetadata": metadata})


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return html.unescape(found[1]).strip() if found else ""


def refusal_in(response: Mapping[str, Any]) -> Refusal:
    """Return the refusal in an error response that botocore has parsed."""
    error: Mapping[str, Any] = response.get("Error", {})
    metadata: Mapping[str, Any] = response.get("ResponseMetadata", {})
    headers: Mapping[str, str] = metadata.get("HTTPHeaders", {})
    status: int = metadata.get("HTTPStatusCode", 0)
    code = str(error.get("Code", ""))
    return Refusal(
        status,
        code if code not in ("", str(status)) else _CODES.get(status, str(status)),
        str(error.get("Message", "")),
        str(error.get("Region", "") or headers.get("x-amz-bucket-region", "")),
        headers.get("date", ""),
    )


@dataclass(frozen=True, slots=True)
class Faults:
    """Translates errors, and adds advice about the tier's options."""

    bucket: str
    server: str
    region: str

    def error(self, refusal: Refusal, *, of_object: bool = False) -> TierError:
        # Remove the additions of services behind S3, as in "KMS.ThrottlingException".
        word = refusal.code.removeprefix("KMS.").removesuffix("Exception")
        kind = _KINDS.get(word) or _STATUSES.get(refusal.status)
        if kind is None:
            kind = TierUnavailableError if refusal.status >= 500 else TierError
        if refusal.status == 501:
            kind = TierError
        if word == "AccessDenied" and of_object:
            kind = ObjectDeniedError
        return kind(self._message(refusal))

    def _message(self, refusal: Refusal) -> str:
        said = f"the server answered {refusal.status} {refusal.code}"
        if refusal.message and refusal.message != refusal.code:
            said += f": {refusal.message.rstrip('.')}"
        advice = self._advice(refusal)
        return f"{advice} ({said})" if advice else said

    def _advice(self, refusal: Refusal) -> str:
        code, region = refusal.code, refusal.region
        if code.removesuffix("Exception") in _ELSEWHERE:
            if region and region != self.region:
                return (
                    f"bucket {self.bucket!r} is in region {region!r}, not {self.region!r}; "
                    f"set option 'region' to {region!r}"
                )
            return (
                f"bucket {self.bucket!r} is not at {self.server} in region {self.region!r}; "
                "check options 'region' and 'endpoint'"
            )
        time = f", where it is {refusal.date}" if refusal.date else ""
        return _ADVICE.get(code, "").format(bucket=self.bucket, server=self.server, time=time)

    def translate(self, error: Exception) -> Exception:
        if isinstance(error, theirs.ClientError):
            return self.error(refusal_in(error.response))
        text = str(error) or type(error).__name__
        if isinstance(error, theirs.ProfileNotFound):
            text += "; check option 'profile' or AWS_PROFILE"
        return next(
            (ours(text) for kinds, ours in _CLASSES if isinstance(error, kinds)), TierError(text)
        )

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except (TierError, ConfigError):
            raise
        except (theirs.BotoCoreError, theirs.ClientError, OSError) as error:
            raise self.translate(error) from error
        except _OF_RESPONSES as error:
            text = str(error) or type(error).__name__
            raise TierError(f"the server's answer is invalid: {text}") from error

    @contextmanager
    def bringing_credentials(self) -> Iterator[None]:
        """Act like :meth:`translated`, and turn errors of credential sources into TierAuthError."""
        with self.translated():
            try:
                yield
            except (theirs.BotoCoreError, TierError, ConfigError):
                raise
            except _OF_CREDENTIALS as error:
                text = str(error) or type(error).__name__
                raise TierAuthError(f"no usable credentials: {text}") from error
