from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.runners import RUNNERS, MisbehavingTier

from kvtier_sdk import (
    Capability,
    MemoryTier,
    RunnerOptions,
    TierCapacityError,
    TierError,
    TieringConfig,
    TierSpec,
    Transfer,
    Usage,
)
from kvtier_sdk.cli.tier_check import TierCheck, check_tiers

CHUNK_BYTES = 4096
PATIENCE_S = 60.0
STEPS = ["open", "store", "lookup", "load", "remove"]


def trials(*tiers: TierSpec | str, timeout_s: float = PATIENCE_S) -> list[TierCheck]:
    config = TieringConfig.from_dict({"slots": 100, "tiers": list(tiers)})
    return list(check_tiers(config, chunk_bytes=CHUNK_BYTES, timeout_s=timeout_s))


def trial_of(
    tier: type[MemoryTier], timeout_s: float = PATIENCE_S, *, name: str = "t", **options: Any
) -> TierCheck:
    runner = options.pop("runner", {})
    config = tier.config_model.model_validate(options)
    spec = TierSpec(name, "memory", tier, config, RunnerOptions.model_validate(runner))
    (trial,) = trials(spec, timeout_s=timeout_s)
    return trial


async def _forget_nothing(self: MemoryTier, keys: Sequence[bytes]) -> None:
    return


class Forgetful(MemoryTier):
    async def lookup(self, keys: Sequence[bytes], request: Any) -> Sequence[bool]:
        return [False] * len(keys)


class Careless(MemoryTier):
    delete = _forget_nothing


class Flipping(MemoryTier):
    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        verdicts = await super().load(batch)
        batch[0].payload[7] ^= 1
        return verdicts


class Full(MemoryTier):
    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        raise TierCapacityError("no room")


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_tier_that_works_passes_every_step(runner: str, tmp_path: Path) -> None:
    found = trials(f"memory:?runner={runner}", f"file://{tmp_path}?runner={runner}&capacity=16KiB")
    for trial in found:
        assert (list(trial.steps_s), trial.fault, trial.remarks) == (STEPS, None, [])
    in_memory, on_disk = (trial.usage for trial in found)
    assert in_memory == Usage(0, 0, None)
    assert on_disk is not None
    assert on_disk.capacity_bytes == 16 * 1024
    assert on_disk.free_bytes
    assert list(tmp_path.rglob("*.kv")) == []


@pytest.mark.parametrize("compress", ["always", "fp8"])
def test_a_compressing_tier_passes_every_step(compress: str) -> None:
    trial = trial_of(MemoryTier, runner={"compress": compress})
    assert (list(trial.steps_s), trial.fault, trial.remarks) == (STEPS, None, [])


def test_two_trials_have_one_namespace_and_keys_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTier, "delete", _forget_nothing)
    stored: list[tuple[bytes, str]] = []
    store = MemoryTier.store

    async def note(self: MemoryTier, batch: Sequence[Transfer]) -> Any:
        stored.extend((one.key, self.context.namespace.fingerprint) for one in batch)
        return await store(self, batch)

    monkeypatch.setattr(MemoryTier, "store", note)
    trials("memory:", "memory:?name=other")
    assert len({key for key, _ in stored}) == len(stored) == 2
    assert len({fingerprint for _, fingerprint in stored}) == 1


def test_a_tier_that_cannot_delete_keeps_the_chunk_and_says_so() -> None:
    class Keeper(MemoryTier):
        capabilities = Capability.NONE

    trial = trial_of(Keeper)
    assert (list(trial.steps_s), trial.fault) == (STEPS[:-1], None)
    assert trial.remarks == ["it cannot delete: a chunk of 4096 bytes stays in it"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_a_tier_warns_of_is_remarked(runner: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kvtier").setLevel(logging.ERROR)
    try:
        trial = trial_of(MisbehavingTier, on_open="warn", runner={"runner": runner})
    finally:
        logging.getLogger("kvtier").setLevel(logging.NOTSET)
    assert (trial.fault, trial.remarks) == (None, ["90 percent full"])
    assert caplog.messages == []


def test_a_remark_names_causes_of_causes_and_no_secret() -> None:
    class Loser(MisbehavingTier):
        async def close(self) -> None:
            try:
                raise OSError("lost //u:pw@host\n  for good")
            except OSError as error:
                raise TierError(f"no {self.config.secret_key.get_secret_value()}") from error

    (remark,) = trial_of(Loser, secret_key="hunter2").remarks
    assert remark.split("\n\n") == [
        "closing the tier failed: OSError: lost //u:***@host\n  for good",
        "The above exception was the direct cause of the following exception: "
        "kvtier_sdk.errors.TierError: no ***",
    ]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_message_that_cannot_be_logged_is_remarked_and_no_fault(runner: str) -> None:
    trial = trial_of(MisbehavingTier, on_open="log_wrong", runner={"runner": runner})
    assert (list(trial.steps_s), trial.fault) == (STEPS, None)
    (remark,) = trial.remarks
    assert remark.startswith("cannot log '%s of %s, //u:***@host': not enough arguments ")
    assert "runners.py:" in remark


def test_a_warning_that_says_what_the_fault_says_is_no_remark() -> None:
    trial = trial_of(Full)
    assert (trial.fault, trial.remarks) == ("t store: no room", [])


def test_a_tier_that_cannot_tell_its_usage_is_tried_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(MemoryTier):
        async def usage(self) -> Usage:
            raise TierError("not today")

    monkeypatch.setattr("kvtier_sdk.cli.tier_check._USAGE_S", 0.01)
    trial = trial_of(Silent)
    assert (list(trial.steps_s), trial.usage, trial.fault) == (STEPS, None, None)
    assert trial.remarks == ["it did not report in time how full it is"]


def test_a_slow_step_is_remarked() -> None:
    trial = trial_of(MemoryTier, latency=0.02, runner={"lookup_deadline": 0.01})
    assert trial.fault is None
    (remark,) = trial.remarks
    assert remark.startswith("lookup took ")
    assert remark.endswith(" and has 0.01 s ('lookup_deadline')")


@pytest.mark.parametrize(
    ("tier", "fault", "advice"),
    [
        (Forgetful, "t lookup: the chunk is not there, although it was stored", None),
        (Careless, "t lookup: the chunk is there, although it was removed", None),
        (Flipping, "t load: ", "do not use this store: "),
        (Full, "t store: no room", "make room in the store"),
    ],
)
def test_a_tier_that_does_not_work_is_told_with_its_step(
    tier: type[MemoryTier], fault: str, advice: str | None
) -> None:
    trial = trial_of(tier)
    assert (trial.fault or "").startswith(fault)
    assert (trial.advice or "").startswith(advice or "")
    assert (trial.advice is None) == (advice is None)


@pytest.mark.parametrize(
    ("on_open", "fault", "advice"),
    [
        ("refuse", "t open: connection refused", "see that the store runs"),
        ("expire", "t open: the key of Ada expired 3 days ago", "correct the credentials"),
        ("misconfigure", "tier 't': option 'bucket' names none", ""),
        ("misbehave", "t open: raised ZeroDivisionError: a bug", "a bug of the backend: "),
        ("hang", "t open: it did not open within 0.2 s", "see whether the store is overloaded"),
        ("dally", "t open: no connection within 2 s", "see whether the store is overloaded"),
    ],
)
def test_a_tier_that_does_not_open_is_told(on_open: str, fault: str, advice: str) -> None:
    timeout_s = 0.2 if on_open == "hang" else PATIENCE_S
    runner = {"runner": "process" if on_open == "refuse" else "thread"}
    trial = trial_of(MisbehavingTier, timeout_s, on_open=on_open, runner=runner)
    assert (trial.fault, trial.steps_s) == (fault, {})
    assert (trial.advice or "").startswith(advice)
    assert bool(trial.advice) == bool(advice)
    assert ("--timeout" in (trial.advice or "")) == (on_open == "hang")


def test_a_tier_that_cannot_be_made_does_not_hide_the_next() -> None:
    class Stillborn(MemoryTier):
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("no driver")

    spec = TierSpec("t", "memory", Stillborn, MemoryTier.config_model(), RunnerOptions())
    first, second = trials(spec, "memory:")
    assert first.fault == "t open: raised RuntimeError: no driver"
    assert (first.advice or "").startswith("a bug of the backend: ")
    assert second.fault is None


def test_a_tier_that_hangs_is_given_up() -> None:
    trial = trial_of(MisbehavingTier, 0.2, on_load="hang")
    assert list(trial.steps_s) == ["open", "store", "lookup"]
    assert trial.fault == "t load: no answer within 0.2 s"
    assert (trial.advice or "").endswith("; --timeout makes the check wait longer")


def test_an_interrupted_trial_does_not_wait_for_the_tier() -> None:
    class Interrupted(MisbehavingTier):
        async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return await super().load(batch)

    # If the trial waited for the load or for the close, it would take an hour.
    with pytest.raises(KeyboardInterrupt):
        # The tier can log after this test, so a unique name keeps those lines out of other tests.
        trial_of(Interrupted, 3600.0, name="interrupted", on_load="hang", close_s=3600.0)
