"""Translates obstore's errors by their text, because most have the class ``GenericError``."""

from __future__ import annotations

import re

from kvtier_sdk import (
    ChunkNotFoundError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)

_STATUS = re.compile(r"\bstatus: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_REASON = re.compile(r'(?:message|error): "([^"]+)"|Invalid\w+\(\s*(\w+)')
_IN_WORDS = {
    "UnknownIssuer": "its certificate is not trusted; set option 'tls_ca'",
    "Interrupted": "it broke in the middle of a response",
    "InvalidContentType": "the server does not speak TLS; write 'http:' in option 'endpoint'",
}


class SettingError(TierUnavailableError):
    """An error caused by a wrong setting. ``open`` raises it as :class:`kvtier_sdk.ConfigError`."""


def first_line(error: BaseException) -> str:
    """Return an error's first line, without the Rust debug output that obstore appends."""
    return str(error).partition("\n")[0].strip()


def error_of(error: BaseException) -> TierError:
    text, first = str(error), first_line(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] if (found := _CODE.search(text)) else ""
    said = f"{status} {code}".strip()
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return SettingError(f"the bucket does not exist ({said}); create it, or correct 'bucket'")
    if isinstance(error, FileNotFoundError):
        return ChunkNotFoundError("no such chunk")
    if status in (401, 403):
        return TierAuthError(f"the server denies access ({said}); check the credentials")
    if status == 507:
        return TierCapacityError(f"the server has no room ({said})")
    if status in (408, 429) or status >= 500:
        return TierUnavailableError(f"the server cannot answer now ({said})")
    if "BareRedirect" in text:
        return SettingError("the bucket is in another region; set option 'region'")
    if kind := _KIND.search(text):
        if kind[1] == "Timeout":
            return TierTimeoutError("no answer within 'timeout'")
        reason = next(filter(None, found.groups())) if (found := _REASON.search(text)) else kind[1]
        return TierUnavailableError(f"no connection: {_IN_WORDS.get(reason, reason)}")
    return TierError(first or f"obstore failed: {type(error).__name__}")
