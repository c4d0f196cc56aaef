from __future__ import annotations

import asyncio

from kvtier_sdk.testing import VirtualClock
from kvtier_sdk.tiering.tier_record import _MOST_LOSSES, Losses


def keys_from(first: int) -> list[bytes]:
    return [number.to_bytes(36, "big") for number in range(first, first + _MOST_LOSSES)]


def test_the_oldest_losses_are_forgotten_and_no_answer_reaches_further_back() -> None:
    clock = VirtualClock()
    began_s = clock.wall_s()
    losses = Losses(clock)
    assert losses.find(b"never") == ("no_record_since", began_s)
    with asyncio.Runner(loop_factory=clock.new_event_loop) as runner:
        for generation in range(3):
            runner.run(clock.sleep(60))
            losses.note(keys_from(generation * _MOST_LOSSES), "evicted")
    losses.note([b"late"], "evicted")
    for lost in keys_from(0)[0], keys_from(_MOST_LOSSES)[-1]:
        assert losses.find(lost) == ("no_record_since", began_s + 120)
    for lost in keys_from(2 * _MOST_LOSSES)[0], b"late":
        assert losses.find(lost) == ("evicted", began_s + 180)


def test_the_last_reason_counts() -> None:
    losses = Losses(VirtualClock())
    losses.note([b"a", b"b"], "store.slow")
    losses.note([b"a"], "expired")
    assert [losses.find(key)[0] for key in (b"a", b"b")] == ["expired", "store.slow"]
