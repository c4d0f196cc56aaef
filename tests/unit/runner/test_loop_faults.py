from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from support.scripted_loop import ERRORS, LOAD, LOOKUP, STORE, Act, Make

from kvtier_sdk import (
    OffloadKey,
    TierAuthError,
    TierError,
    TierUnavailableError,
    Transfer,
    make_offload_key,
)
from kvtier_sdk.runner import chunk_mover
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import Operation

BAD, GOOD, OTHER = (make_offload_key(name) for name in (b"bad", b"good", b"other"))


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind != "not found"])
def test_only_the_store_after_a_failed_load_replaces(make: Make, kind: str) -> None:
    rig = make(retries=0)
    rig.do(STORE, BAD, GOOD)
    rig.tier.always["load"] = Act(kind)
    assert rig.do(LOAD, BAD) != ["ok"]
    del rig.tier.always["load"]
    assert rig.do(LOAD, GOOD) == ["ok"]
    assert rig.do(STORE, GOOD, BAD) == ["ok", "ok"]
    assert rig.tier.replaced == [BAD]
    assert rig.do(STORE, GOOD, BAD) == ["ok", "ok"]
    assert rig.tier.replaced == [BAD]


def test_a_load_that_is_tried_again_is_verified_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    load, calls = rig.tier.load, iter(range(2))

    async def fail_then_flip(batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        verdicts = await load(batch)
        if next(calls) == 0:
            batch[0].verify()
            raise TierUnavailableError("gone")
        batch[0].payload[0] ^= 1
        return verdicts

    monkeypatch.setattr(rig.tier, "load", fail_then_flip)
    assert rig.do(STORE, GOOD) == ["ok"]
    assert rig.do(LOAD, GOOD) == ["corrupt"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_chunk_is_replaced_too_unless_digests_are_off(make: Make, verify: bool) -> None:
    rig = make(verify=verify)
    rig.do(STORE, BAD)
    rig.tier.stored[BAD] = rig.tier.stored[BAD][:-1] + b"?"
    assert rig.do(LOAD, BAD) == ["corrupt" if verify else "ok"]
    rig.do(STORE, BAD)
    assert rig.tier.replaced == ([BAD] if verify else [])


def test_a_damaged_chunk_that_may_not_be_deleted_is_replaced_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(keys: Sequence[OffloadKey]) -> None:
        raise TierAuthError("objects are locked")

    rig = make()
    rig.do(STORE, BAD)
    rig.tier.stored[BAD] = rig.tier.stored[BAD][:-1] + b"?"
    monkeypatch.setattr(rig.tier, "delete", refuse)
    assert rig.do(LOAD, BAD) == ["corrupt"]
    rig.do(STORE, BAD)
    assert rig.tier.replaced == [BAD]


def test_what_is_absent_or_loads_again_needs_no_replacing(make: Make) -> None:
    rig = make(retries=0)
    assert rig.do(LOAD, BAD) == ["not_found"]
    rig.do(STORE, BAD)
    rig.tier.always["load"] = Act("unavailable")
    rig.do(LOAD, BAD)
    del rig.tier.always["load"]
    assert rig.do(LOAD, BAD) == ["ok"]
    rig.do(STORE, BAD)
    assert rig.tier.replaced == []


def test_a_store_that_fails_leaves_the_next_one_to_replace(make: Make) -> None:
    rig = make(retries=0)
    rig.tier.always.update({"load": Act("faulty"), "store": Act("unavailable")})
    rig.do(LOAD, BAD)
    rig.do(STORE, BAD)
    del rig.tier.always["store"]
    rig.do(STORE, BAD)
    assert rig.tier.replaced == [BAD, BAD]


def test_a_load_that_never_ends_is_a_failed_one(make: Make) -> None:
    rig = make(Act(after_s=1000.0, stubborn=True))
    assert rig.do(LOAD, BAD, run_s=6.0) == ["timeout"]
    rig.do(STORE, BAD)
    assert rig.tier.replaced == [BAD]
    rig.account.job_of[BAD] = 0  # the hanging load, which is job 0, still writes to this slot


def test_the_memory_of_failed_loads_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_mover, "_MAX_UNLOADED", 2)
    rig = make()
    rig.tier.always["load"] = Act("faulty")
    for name in (BAD, OTHER, GOOD):
        rig.do(LOAD, name)
    rig.do(STORE, BAD, OTHER, GOOD)
    assert rig.tier.replaced == [OTHER, GOOD]


def test_one_bad_object_opens_no_breaker(make: Make) -> None:
    rig = make()
    rig.tier.always["load"] = Act("faulty")
    for _ in range(40):
        assert rig.do(LOAD, BAD) == ["failed"]
    assert rig.account.moves == []


@pytest.mark.parametrize("chunks", [1, 5])
def test_distinct_bad_objects_and_no_good_one_open_it(make: Make, chunks: int) -> None:
    rig = make()
    rig.tier.always["load"] = Act("faulty")
    for _ in range(5 // chunks):
        assert rig.account.moves == []
        rig.submit(rig.job(LOAD, chunks))
        rig.run_for(0.01)
        rig.ask(LOOKUP, run_s=0.01)  # finds the object without reading it
    assert rig.account.breakers[Direction.READ] is BreakerState.OPEN
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED
    del rig.tier.always["load"]
    rig.run_for(1.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED


def test_lookups_that_can_examine_no_object_open_it(make: Make) -> None:
    rig = make()
    rig.tier.always["lookup"] = Act("faulty")
    rig.do(LOOKUP, BAD)
    rig.do(LOOKUP, BAD)
    assert rig.account.moves == []
    rig.submit(rig.job(LOOKUP, 4))
    rig.run_for(0.01)
    assert rig.account.breakers[Direction.READ] is BreakerState.OPEN


@pytest.mark.parametrize("operation", [LOAD, STORE])
@pytest.mark.parametrize("way", ["raised", "raised as it is", "returned"])
def test_a_kept_exception_holds_no_buffer(make: Make, operation: Operation, way: str) -> None:
    """Rust client libraries keep the last exception, with its frames, until the next call."""
    kept: list[BaseException] = []
    lent: list[weakref.ref[memoryview]] = []

    async def fail(self: Any, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        lent.extend(weakref.ref(transfer.payload) for transfer in batch)
        try:
            try:
                raise ExceptionGroup("all of it", [OSError("gone")])
            except ExceptionGroup as error:
                kept.extend([error, *error.exceptions])
                if way == "raised as it is":
                    raise
                raise TierUnavailableError("gone") from error
        except TierError as error:
            kept.append(error)
            if way == "returned":
                return [error] * len(batch)
            raise

    rig = make(retries=0, declares={operation.value: fail})
    assert rig.do(operation, GOOD, OTHER) == ["contract" if "as" in way else "unavailable"] * 2
    assert kept
    assert [view() for view in lent] == [None, None]
