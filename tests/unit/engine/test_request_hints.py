from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_sdk import Hint, RequestContext, Verb
from kvtier_sdk.engine import read_request

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
_NAMES = st.sampled_from(
    ["session", "tenant", "priority", "pin", "retain", "resume_in", "prefetch", "demote", "end"]
)
_VALUES = st.recursive(
    _LEAVES | st.sampled_from(["5m", "0s", "1e9h"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["for", "tokens", "priority", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def read(table: object) -> RequestContext:
    return read_request("r", {"kvtier": table})


@given(_VALUES | st.dictionaries(_NAMES | st.text(max_size=9), _VALUES, max_size=4))
@example({"pin": [[]]})
@example({"\\x1b[2K": 1})
@example({"session": "x" * 1_000_000})
@example({"x" * 1_000_000: 1})
def test_nothing_is_an_error_and_what_is_read_is_within_bounds(table: Any) -> None:
    request = read(table)
    assert len(request.session or "") <= 256
    assert 0 <= request.priority <= 100
    assert not math.isnan(request.resume_in_s or 0.0)
    for hint in request.hints:
        assert len(hint.mistake) <= 500
        assert hint.mistake.isprintable()
        assert 0 <= (hint.duration_s or 0.0) < math.inf


@pytest.mark.parametrize(
    ("table", "hints"),
    [
        ({"pin": True}, [Hint(Verb.PIN, 300.0)]),
        ({"pin": "1h"}, [Hint(Verb.PIN, 3600.0)]),
        ({"pin": False, "end": False}, []),
        (
            {"retain": [{"for": 60, "tokens": [0, 4096], "priority": 80}, "5s"]},
            [Hint(Verb.RETAIN, 60.0, (0, 4096), 80), Hint(Verb.RETAIN, 5.0)],
        ),
        ({"resume_in": 8, "prefetch": True}, [Hint(Verb.RESUME_IN), Hint(Verb.PREFETCH)]),
        ({"prefetch": "other"}, [Hint(Verb.PREFETCH, session="other")]),
        ({"session": "s", "tenant": "t", "priority": 7}, []),
    ],
)
def test_each_form_of_a_hint(table: dict[str, Any], hints: list[Hint]) -> None:
    assert list(read(table).hints) == hints


def test_the_last_turn() -> None:
    ended, demoted = read({"end": True}), read({"demote": True})
    assert (ended.resume_in_s, ended.is_over) == (math.inf, True)
    assert (demoted.resume_in_s, demoted.is_over) == (math.inf, False)


@pytest.mark.parametrize(
    ("table", "advice"),
    [
        ({"pinn": "5m"}, "pinn: did you mean 'pin'? allowed: demote, end, pin,"),
        ({"pin": "5"}, "pin.0.for: '5' has no unit; write for example '250ms' or '5s'"),
        ({"resume_in": math.nan}, "resume_in: nan is not a duration"),
        ({"pin": {"tokens": [3]}}, "pin.0.tokens: write two numbers such as [0, 4096]"),
        ({"prefetch": 5}, "prefetch: write true, or a session's name of at most 256 characters"),
        ({"session": "s" * 2**20}, "session: String should have at most 256 characters"),
        ({"priority": 101}, "priority: Input should be less than or equal to 100"),
        ({"resume_in": 10**400}, "resume_in: 1000"),
        ({"resume_in": "1" * 400 + "s"}, "resume_in: 's' is a unit, but the number before it"),
        ({"pin": [1] * 10**6}, "pin: 1,000,000 of them; the most is 16"),
        ({str(n): n for n in range(20_000)}, "kvtier: write a table"),
        ("5m", 'kvtier: write a table such as {"session": "chat 7", "pin": "5m"}'),
        (
            {"pin": "5m", "retain": {"fore": 1}},
            "retain.0.fore: did you mean 'for'? allowed: for, priority, tokens",
        ),
    ],
)
def test_a_mistake_refuses_all_hints_of_the_request(table: Any, advice: str) -> None:
    (hint,) = read(table).hints
    assert hint.verb is Verb.UNKNOWN
    assert hint.mistake.startswith(advice)


def test_no_file_and_no_variable_is_read_for_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    assert read({"session": "${SECRET}"}).session == "${SECRET}"
    assert "allowed" in read({"session_file": "/etc/passwd"}).hints[0].mistake


def test_actions_of_an_envelope() -> None:
    request = read_request(
        "r",
        None,
        [("pin", {"for": "5m", "session": "s"}), ("resume_in", {"value": 8}), ("demote", {})],
    )
    assert request.session == "s"
    assert [hint.verb for hint in request.hints] == [Verb.PIN, Verb.RESUME_IN, Verb.DEMOTE]
    assert read_request("r", {"other": 1}) == RequestContext("r", {"other": 1})
