"""What a tier's process says of an error that it raised, and what the engine makes of it."""

from __future__ import annotations

import json
import socket
import ssl

import pytest
from support.runners import ExpiredError

from kvtier_sdk import ConfigError, TierError
from kvtier_sdk.runner.process.bootstrap import read_error, write_error


class OddError(Exception):
    """Takes more than it keeps, and says what none of it was."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(code, object())
        self.hint = hint

    def __str__(self) -> str:
        return f"try {self.hint}"


class StubbornError(ConnectionError):
    """Cannot be made of a text."""

    def __new__(cls, host: str, port: int) -> StubbornError:
        return super().__new__(cls)

    def __str__(self) -> str:
        return "no way"


def across(error: BaseException) -> BaseException:
    return read_error(json.loads(json.dumps(write_error(error))))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("option 'bucket' names none"),
        ExpiredError("Ada", 3),
        Exception("just that"),
        ValueError(),
        KeyError("ttl"),
        FileNotFoundError(2, "No such file or directory"),
        PermissionError(13, "Permission denied", "/data/kv"),
        socket.gaierror(-2, "Name or service not known"),
        ssl.SSLError(1, "CERTIFICATE_VERIFY_FAILED"),
        OddError(7, hint="again"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_with_its_class_and_its_text(error: Exception) -> None:
    arrived = across(error)
    assert str(arrived) == str(error)
    assert type(arrived) is type(error)


def test_what_cannot_be_made_again_is_said_by_name() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    group = ExceptionGroup("unhandled errors in a TaskGroup", [refused])
    assert across(group).args == (
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): "
        "ConnectionRefusedError: [Errno 111] Connection refused",
    )
    assert type(across(group)) is TierError


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (StubbornError("db", 5432), ConnectionError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), UnicodeError),
    ],
)
def test_a_base_will_do_where_the_class_will_not(error: Exception, base: type[Exception]) -> None:
    arrived = across(error)
    assert type(arrived) is base
    assert str(arrived) == str(error)
