"""Each call to a tier has distinct keys, and no more than ``max_batch_keys``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_loop import CHUNK_BYTES, LOAD, LOOKUP, STORE, TOUCH, Act, Rig

from kvtier_sdk import Operation, make_offload_key
from kvtier_sdk.runner.jobs import batches_of

NAMES = [make_offload_key(b"%d" % number) for number in range(5)]
NAME_LISTS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=12)


@given(st.lists(st.sampled_from(NAMES)), st.integers(1, 8))
def test_a_job_is_split_into_calls_without_repeats(keys: list[bytes], most: int) -> None:
    batches = batches_of(keys, most)
    assert sorted(index for batch in batches for index in batch) == list(range(len(keys)))
    for batch in batches:
        assert 1 <= len(batch) <= most
        assert len({keys[index] for index in batch}) == len(batch)


@given(NAME_LISTS, NAME_LISTS, NAME_LISTS, st.none() | st.integers(1, 4), st.integers(1, 4))
def test_each_key_gets_its_answer_and_its_bytes_however_often_it_is_named(
    stored: list[bytes],
    loaded: list[bytes],
    asked: list[bytes],
    max_batch_keys: int | None,
    concurrency: int,
) -> None:
    # When the test ends, the rig fails if a call had a repeated key or too many keys.
    rig = Rig(declares={"max_batch_keys": max_batch_keys}, concurrency=concurrency)
    store = rig.job(STORE, names=stored)
    for key, slot in zip(stored, store.slots, strict=True):
        rig.slots.padded_view(slot, 1)[:] = key[:1] * CHUNK_BYTES
    rig.submit(store)
    rig.run_for(1.0)
    assert set(rig.account.verdicts(store.job_id)) == {"ok"}

    load = rig.job(LOAD, names=loaded)
    rig.submit(load)
    rig.run_for(1.0)
    for key, slot, verdict in zip(
        loaded, load.slots, rig.account.verdicts(load.job_id), strict=True
    ):
        assert verdict == ("ok" if key in stored else "not_found")
        if verdict == "ok":
            assert rig.slots.padded_view(slot, 1) == key[:1] * CHUNK_BYTES

    lookup = rig.job(LOOKUP, names=asked)
    rig.submit(lookup, rig.job(TOUCH, names=asked))
    rig.run_for(1.0)
    expected = ["ok" if key in stored else "not_found" for key in asked]
    assert rig.account.verdicts(lookup.job_id) == expected

    rig.submit(rig.job(Operation.DELETE, names=asked))
    rig.run_for(1.0)
    assert not rig.tier.stored.keys() & set(asked)
    rig.close()


def test_calls_of_one_lookup_run_side_by_side_up_to_the_concurrency() -> None:
    rig = Rig(declares={"max_batch_keys": 1}, concurrency=2)
    rig.tier.always["lookup"] = Act(after_s=1.0)
    job = rig.job(LOOKUP, keys=5, within_s=10.0)
    rig.submit(job)
    rig.run_for(3.5)
    assert [at_s for _, at_s in rig.tier.calls] == pytest.approx([0, 0, 1, 1, 2])
    assert rig.account.verdicts(job.job_id) == ["not_found"] * 5
    rig.close()


def test_at_its_deadline_a_split_lookup_keeps_the_answers_that_it_has() -> None:
    rig = Rig(declares={"max_batch_keys": 1}, concurrency=1)
    rig.tier.always["lookup"] = Act(after_s=1.0)
    job = rig.job(LOOKUP, keys=4, within_s=2.5)
    rig.submit(job)
    rig.run_for(5.0)
    assert rig.account.verdicts(job.job_id) == ["not_found"] * 2 + ["timeout"] * 2
    assert len(rig.tier.calls) == 3, "none begins after the end of the job"
    rig.close()


def test_a_touch_is_split_in_order() -> None:
    rig = Rig(declares={"max_batch_keys": 2})
    rig.tier.always["touch"] = Act(after_s=1.0)
    rig.submit(rig.job(TOUCH, keys=5, within_s=10.0))
    rig.run_for(5.0)
    assert [at_s for _, at_s in rig.tier.calls] == pytest.approx([0, 1, 2])
    rig.close()
