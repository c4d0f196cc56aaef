from __future__ import annotations

import subprocess
import sys

import pytest

from kvtier_sdk import (
    ConfigError,
    MemoryTier,
    MemoryTierConfig,
    RunnerOptions,
    TierSpec,
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
    given = dict(entry)
    assert TierSpec.from_options(entry) == TierSpec.from_url("memory:?capacity=1KiB&name=memory")
    assert entry == given


def test_options_beside_a_url_are_added_to_its_own() -> None:
    spec = TierSpec.from_url("memory:?capacity=1KiB", latency="1ms", retries=0)
    assert isinstance(spec.config, MemoryTierConfig)
    assert (spec.config.capacity_bytes, spec.config.latency_s) == (1024, 0.001)
    assert spec.runner.retries == 0


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
def test_the_first_reading_of_a_tier_takes_few_calls(tier: object) -> None:
    code = f"""
import sys
from collections import Counter
from kvtier_sdk import TieringConfig

calls = []

def note(frame, event, argument):
    if event == "call" and "kvtier_sdk" in frame.f_code.co_filename:
        calls.append(frame.f_code.co_qualname)

sys.setprofile(note)
TieringConfig.from_dict({{"slots": 8, "tiers": [{tier!r}]}})
sys.setprofile(None)
assert 10 < len(calls) <= 150, Counter(calls).most_common(8)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
