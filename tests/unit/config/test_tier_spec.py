from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest

from kvtier_sdk import (
    ConfigError,
    MemoryTier,
    MemoryTierConfig,
    RunnerOptions,
    TieringConfig,
    TierSpec,
    UnknownBackendError,
)


def test_a_url_says_it_all() -> None:
    spec = TierSpec.from_url("memory:?capacity=1GiB&load_deadline=2s&name=cold")
    assert spec == TierSpec(
        name="cold",
        backend="memory",
        tier_class=MemoryTier,
        config=MemoryTierConfig(capacity=2**30),
        runner=RunnerOptions(load_deadline=2.0),
    )


def test_a_tier_is_named_after_its_backend_unless_it_has_a_name() -> None:
    assert TierSpec.from_url("memory:").name == "memory"
    assert TierSpec.from_options({"type": "memory", "name": "warm"}).name == "warm"


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "memory", "capacity": "1KiB"},
        {"type": "kvtier", "backend": "memory", "capacity": "1KiB"},
        {"backend": "memory", "capacity": "1KiB"},
        {"url": "memory:?capacity=1KiB"},
        {"type": "kvtier", "url": "memory:?capacity=1KiB"},
        {"type": "memory", "url": "memory:", "capacity": "1KiB"},
    ],
)
def test_every_spelling_of_an_entry_means_the_same(entry: dict[str, object]) -> None:
    assert TierSpec.from_options(entry) == TierSpec.from_url("memory:?capacity=1KiB")


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "memory", "url": "file:///data/kv"},
        {"type": "kvtier", "backend": "memory", "url": "file:///data/kv"},
        {"type": "memory", "url": "nobodys:"},
    ],
)
def test_a_type_and_the_url_of_another_backend_contradict_each_other(
    entry: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match="option 'url' begins with '.*:', which is not the back"):
        TierSpec.from_options(entry)


def test_options_beside_a_url_are_added_to_its_own() -> None:
    spec = TierSpec.from_url("memory:?capacity=1KiB", latency="1ms", retries=0)
    assert isinstance(spec.config, MemoryTierConfig)
    assert (spec.config.capacity_bytes, spec.config.latency_s) == (1024, 0.001)
    assert spec.runner.retries == 0


@pytest.mark.parametrize(
    ("url", "beside", "option"),
    [
        ("memory:?capacity=1KiB", {"capacity": "2KiB"}, "capacity"),
        ("memory:?retries=1", {"retries": 2}, "retries"),
        ("memory:?name=a", {"name": "b"}, "name"),
    ],
)
def test_an_option_both_in_the_url_and_beside_it_is_refused(
    url: str, beside: dict[str, object], option: str
) -> None:
    with pytest.raises(ConfigError, match=f"option '{option}' is given in the URL and beside it"):
        TierSpec.from_url(url, **beside)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "option 'type' is missing; it names the backend"),
        ({"capacity": "1KiB"}, "option 'type' is missing; it names the backend"),
        ({"type": "kvtier"}, "option 'backend' is missing; it names the backend"),
        ({"type": 5}, "option 'type' is 5 but should be text"),
        ({"tpye": "memory"}, "unknown option 'tpye'; did you mean 'type'"),
    ],
)
def test_an_entry_without_a_backend_is_refused(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"tier 2: {message}"):
        TierSpec.from_options(entry, where="tier 2")


@pytest.mark.parametrize("url", [None, 5, b"memory:"])
def test_a_url_that_is_no_text_is_refused(url: object) -> None:
    with pytest.raises(ConfigError, match="tier 2: option 'url'"):
        TierSpec.from_options({"url": url}, where="tier 2")


def test_a_complaint_begins_with_the_entry() -> None:
    with pytest.raises(ConfigError, match="^tier 2: unknown option 'capcity'"):
        TierSpec.from_options({"type": "memory", "capcity": 1}, where="tier 2")
    with pytest.raises(ConfigError, match=r"^tier 'memory:\?capcity=1': unknown option"):
        TierSpec.from_url("memory:?capcity=1")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("capcity", "capacity"), ("load_dedline", "load_deadline"), ("nam", "name")],
)
def test_a_misspelt_option_is_corrected_whoever_owns_it(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{wrong}'; did you mean '{right}'"):
        TierSpec.from_options({"type": "memory", wrong: "1s"})


def test_a_wrong_runner_option_is_told_like_any_other() -> None:
    with pytest.raises(ConfigError, match="^tier 2: option 'load_deadline'"):
        TierSpec.from_options({"type": "memory", "load_deadline": "soon"}, where="tier 2")


def test_an_unknown_backend_is_an_error_of_the_registry() -> None:
    with pytest.raises(UnknownBackendError, match="did you mean 'memory'"):
        TierSpec.from_url("memry:")


def test_the_entry_is_not_changed() -> None:
    entry = {"url": "memory:?name=a", "capacity": "1KiB"}
    TierSpec.from_options(entry)
    assert entry == {"url": "memory:?name=a", "capacity": "1KiB"}


def test_a_backends_own_defaults_hold_unless_the_operator_sets_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"lookup_deadline": "200ms", "concurrency": 4}
    monkeypatch.setattr(MemoryTier, "runner_defaults", own)
    spec = TierSpec.from_url("memory:?concurrency=2")
    assert spec.runner == RunnerOptions(lookup_deadline=0.2, concurrency=2)
    assert TierSpec.from_options(spec.to_dict()) == spec
    assert own == {"lookup_deadline": "200ms", "concurrency": 4}


def test_a_backend_that_needs_a_process_is_given_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTier, "needs_process", True)
    for option in ("auto", "process"):
        TierSpec.from_url(f"memory:?runner={option}")
    with pytest.raises(ConfigError) as caught:
        TierSpec.from_options({"type": "memory", "runner": "thread"}, where="kv.toml", path="t[0]")
    assert str(caught.value) == (
        "kv.toml: option 't[0].runner' is 'thread', but backend 'memory' has to run in a process "
        "of its own; leave the option out"
    )


@pytest.mark.parametrize(
    "tier",
    ["memory:?capacity=1GiB&load_deadline=2s", {"type": "memory", "capacity": "1GiB", "ttl": "1h"}],
)
def test_reading_a_tier_takes_few_calls(tier: object) -> None:
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        where = frame.f_code.co_filename
        if event == "call" and "kvtier_sdk" in where:
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        TieringConfig.from_dict({"slots": 8, "tiers": [tier]})
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= 150, Counter(calls).most_common(8)
