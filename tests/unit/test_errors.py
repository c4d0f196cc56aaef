from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

import kvtier_sdk.errors
from kvtier_sdk import (
    BackendError,
    BackendLoadError,
    ConfigError,
    DuplicateBackendError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownBackendError,
    check_any_answered,
    map_exceptions,
)

RETRYABLE = {TierTimeoutError, TierUnavailableError}
TIER_ERRORS = [
    found
    for found in vars(kvtier_sdk.errors).values()
    if isinstance(found, type) and issubclass(found, TierError)
]


def test_a_class_is_caught_as_its_base() -> None:
    assert issubclass(ConfigError, ValueError)
    for error_class in (UnknownBackendError, DuplicateBackendError, BackendLoadError):
        assert issubclass(error_class, BackendError)


@pytest.mark.parametrize("error_class", TIER_ERRORS)
def test_the_class_says_whether_to_retry_unless_the_author_does(
    error_class: type[TierError],
) -> None:
    assert error_class("x").retryable is (error_class in RETRYABLE)
    assert error_class("x", retryable=True).retryable is True
    assert error_class("x", retryable=False).retryable is False


def test_the_text_names_tier_and_operation_once_they_are_known() -> None:
    error = TierError("no route")
    assert str(error) == "no route"
    error.operation = "load"
    assert str(error) == "load: no route"
    error.tier = "cold"
    assert str(error) == "cold load: no route"


def test_a_tier_error_survives_the_way_between_processes() -> None:
    error = TierTimeoutError("slow", retryable=False)
    error.tier, error.operation = "cold", "store"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.retryable) == (TierTimeoutError, str(error), False)


def test_a_mapped_exception_is_translated_and_kept_as_the_cause() -> None:
    original = ConnectionError("no route to host")
    with (
        pytest.raises(TierUnavailableError, match="^no route to host$") as caught,
        map_exceptions({OSError: TierUnavailableError}),
    ):
        raise original
    assert caught.value.__cause__ is original


@pytest.mark.parametrize(
    ("mapping", "raised", "expected"),
    [
        ({TimeoutError: TierTimeoutError}, TimeoutError(), "TierTimeoutError('TimeoutError')"),
        (
            {PermissionError: TierAuthError, OSError: TierUnavailableError},
            PermissionError("denied"),
            "TierAuthError('denied')",
        ),
        (
            {(KeyError, OSError): TierUnavailableError},
            OSError("gone"),
            "TierUnavailableError('gone')",
        ),
        ({OSError: TierUnavailableError}, ZeroDivisionError(), "ZeroDivisionError()"),
        ({BaseException: TierError}, asyncio.CancelledError(), "CancelledError()"),
    ],
    ids=["without text", "first match", "tuple", "unknown", "cancellation"],
)
def test_an_exception_is_translated_by_the_first_entry_that_matches(
    mapping: dict[Any, type[TierError]], raised: BaseException, expected: str
) -> None:
    with pytest.raises(BaseException) as caught, map_exceptions(mapping):
        raise raised
    assert repr(caught.value) == expected


def test_a_tier_error_passes_through_a_mapping_unchanged() -> None:
    original = TierCapacityError("full")
    with (
        pytest.raises(TierCapacityError) as caught,
        map_exceptions({Exception: TierUnavailableError}),
    ):
        raise original
    assert caught.value is original


def test_the_causes_of_a_verdict_hold_no_frames_either() -> None:
    kept = OSError("gone"), ValueError("odd"), TierUnavailableError("down")
    try:
        try:
            raise kept[0]
        except OSError:
            raise kept[1] from None
    except ValueError as odd:
        kept[2].__cause__ = ExceptionGroup("both", [odd])
    # Close a cycle of causes, so that the test fails if ``detached`` follows causes endlessly.
    kept[0].__cause__ = kept[2]
    kept[2].detached()
    assert [error.__traceback__ for error in kept] == [None] * 3


def test_an_outage_of_some_is_none_of_all() -> None:
    down, slow = TierUnavailableError("down"), TierTimeoutError("slow")
    check_any_answered([])
    check_any_answered([down, False, slow])
    with pytest.raises(TierUnavailableError) as caught:
        check_any_answered([down, slow])
    assert caught.value is down
