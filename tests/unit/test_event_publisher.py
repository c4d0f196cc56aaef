from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from support.router import Router, free_endpoints, publisher_at  # noqa: E402

from kvtier_sdk import (  # noqa: E402
    ConfigError,
    Locality,
    Medium,
    OffloadKey,
    event_publisher,
    make_offload_key,
)
from kvtier_sdk.event_publisher import AnnouncedChunks, EventPublisher  # noqa: E402
from kvtier_sdk.events import (  # noqa: E402
    ChunkNote,
    OffloadingEvent,
    announce_blocks,
    parents_first,
)

Make = Callable[..., EventPublisher]


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


def event(
    *keys: OffloadKey, tier: str = "file", removed: bool = False, **of: Any
) -> OffloadingEvent:
    medium = Medium.CPU if tier == "host" else Medium.STORAGE
    return OffloadingEvent(keys, tier, medium, Locality.LOCAL, removed, **of)


def note(*blocks: int, parent: int | None = None) -> bytes:
    tokens = list(range(2 * len(blocks)))
    return ChunkNote(list(blocks), parent, tokens, 2, kind="full_attention").encode()


@pytest.fixture
def endpoints() -> list[str]:
    return free_endpoints()


@pytest.fixture
def publish(endpoints: list[str]) -> Iterator[Make]:
    made: list[EventPublisher] = []

    def make(tokens: bool = False) -> EventPublisher:
        made.append(publisher_at(endpoints, "kv", tokens=tokens))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_late_router_gets_everything_and_then_what_is_new(
    publish: Make, endpoints: list[str]
) -> None:
    publisher = publish()
    publisher.put(event(key(1), key(2)))
    publisher.put(event(key(2), removed=True))
    publisher.put(event(key(3), tier="host", session="chat"))
    router = Router(*endpoints)
    router.catch_up()
    assert router.snapshots == 1
    assert set(router.blocks) == {("STORAGE", 0, 1), ("CPU", 0, 3)}
    publisher.put(event(key(4)))
    router.catch_up()
    assert router.snapshots == 1
    assert router.has([1, 4])
    router.close()


@pytest.mark.parametrize(("kept_bytes", "loss", "snapshots"), [(10_000, 0.5, 1), (100, 1.0, 2)])
def test_a_router_that_missed_more_than_is_kept_gets_a_snapshot(
    publish: Make,
    endpoints: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kept_bytes: int,
    loss: float,
    snapshots: int,
) -> None:
    monkeypatch.setattr(event_publisher, "_MOST_KEPT_BYTES", kept_bytes)
    publisher = publish()
    router = Router(*endpoints)
    router.catch_up()
    for number in range(20):
        publisher.put(event(key(number)))
        router._loss = loss
        router.listen(0.1)
    router.catch_up()
    assert len(router.blocks) == 20
    assert router.snapshots == snapshots
    router.close()


def told(chunks: AnnouncedChunks, *events: OffloadingEvent) -> list[tuple[str, list[int]]]:
    found = [one for of in events for one in chunks.apply(of)]
    return [(one["type"], one.get("block_hashes", [])) for one in found]


def test_a_block_is_told_once_for_all_tiers_and_chunks_of_a_medium() -> None:
    chunks = AnnouncedChunks(tokens=True)
    assert told(chunks, event(key(2), notes=[note(1, 2)])) == [("BlockStored", [1, 2])]
    # Blocks 1 and 2 are announced once, although tier ``cold`` has both and chunk 3 has block 1.
    assert told(chunks, event(key(2), tier="cold")) == []
    (stored,) = chunks.apply(event(key(3), notes=[note(1, 3)]))
    assert (stored["block_hashes"], stored["parent_block_hash"]) == ([3], 1)
    assert stored["token_ids"] == [2, 3]
    assert told(chunks, event(key(2), removed=True)) == []
    assert told(chunks, event(key(2), tier="cold", removed=True)) == [("BlockRemoved", [2])]
    assert told(chunks, event(key(3), removed=True)) == [("BlockRemoved", [1, 3])]


def test_a_chunk_is_told_with_its_tokens_or_not_at_all() -> None:
    chunks = AnnouncedChunks(tokens=True)
    assert told(chunks, event(key(1)), event(key(1), tier="host")) == []
    assert told(chunks, event(key(1), notes=[note(1)])) == 2 * [("BlockStored", [1])]
    (bare,) = AnnouncedChunks(tokens=False).apply(event(key(9), notes=[note(7, 8)]))
    assert (bare["block_hashes"], bare["token_ids"]) == ([9], [])


def test_a_new_loop_of_a_tier_makes_void_what_the_old_one_has_told() -> None:
    chunks = AnnouncedChunks(tokens=False)
    told(chunks, event(key(1), key(2)), event(key(1), tier="host"))
    assert told(chunks, event(removed=True)) == [("BlockRemoved", [1]), ("BlockRemoved", [2])]
    assert [one["type"] for one in chunks.snapshot()] == ["AllBlocksCleared", "BlockStored"]


def test_a_snapshot_names_parents_first() -> None:
    def sort(parents: dict[int, int | None]) -> list[OffloadKey]:
        return list(parents_first({key(n): note(n, parent=of) for n, of in parents.items()}))

    chain = {n: n - 1 if n else None for n in (5, 3, 4, 0, 2, 1)}
    assert sort(chain) == [key(n) for n in range(6)]
    assert sorted(sort({1: 2, 2: 1})) == [key(1), key(2)]


def filled(publish: Make, blocks: range) -> EventPublisher:
    """Return a publisher whose snapshots do not fit into a socket's buffers."""
    publisher, tokens = publish(tokens=True), list(range(100_000, 100_250))
    notes = [ChunkNote([n], None, tokens, 250).encode() for n in blocks]
    publisher.put(event(*map(key, blocks), notes=notes))
    while len(publisher._chunks) < len(blocks) or publisher._events:
        time.sleep(0.01)
    return publisher


def test_an_answer_is_made_while_its_router_reads_it(
    publish: Make, endpoints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "_PATIENCE_MS", 500)
    monkeypatch.setattr(event_publisher, "_MOST_UNREAD_ANSWERS", 2)
    blocks = range(20_000)
    publisher = filled(publish, blocks)
    made: list[int] = []
    batch = publisher._batch

    def counted(events: list[Any]) -> bytes:
        made.append(len(events))
        return batch(events)

    monkeypatch.setattr(publisher, "_batch", counted)
    router = Router(*endpoints)
    router.catch_up()
    made.clear()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stuck:
        stuck.set_hwm(1)
        stuck.connect(endpoints[1])
        stuck.send_multipart([b"", bytes(8)])
        while not sum(made):
            time.sleep(0.01)
        # An unread answer must not delay events for other routers.
        publisher.put(event(key(blocks[-1]), removed=True))
        router.await_blocks(blocks[:-1])
        assert sum(made) < 0.8 * len(blocks)
        router.close()
        stuck.close(linger=0)


def test_a_router_that_reads_slowly_does_not_hold_up_the_engines_end(
    publish: Make, endpoints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "_MOST_UNREAD_ANSWERS", 2)
    publisher = filled(publish, range(20_000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow:
        slow.set_hwm(1)
        slow.connect(endpoints[1])
        slow.send_multipart([b"", bytes(8)])
        slow.recv_multipart()
        ending = threading.Thread(target=publisher.close)
        ending.start()
        for _ in range(10):
            if slow.poll(0):
                slow.recv_multipart()
            ending.join(0.5)
        assert not ending.is_alive()
        slow.close(linger=0)


def test_an_older_source_is_not_heard(publish: Make, endpoints: list[str]) -> None:
    publisher = publish()
    old, new = publisher.source(), publisher.source()
    new(event(key(1)))
    old(event(key(2)))
    old(event(removed=True))
    router = Router(*endpoints)
    router.catch_up()
    assert set(router.blocks) == {("STORAGE", 0, 1)}
    router.close()


def test_a_block_is_there_while_all_its_chunks_are() -> None:
    chunks, told = AnnouncedChunks(tokens=True), []

    def block_of(chunk: OffloadKey) -> tuple[int, int, int] | None:
        number = int.from_bytes(chunk[:32], "big")
        return None if number > 20 else (-1 - number // 2, 3, 2)

    def take(of: OffloadingEvent) -> None:
        told.extend((one["type"], one["block_hashes"]) for one in chunks.apply(of))

    tell = announce_blocks(take, block_of)
    tell(event(key(0), key(2), key(21)))
    assert told == []
    tell(event(key(1)))
    tell(event(key(0), removed=True))
    tell(event(key(1), removed=True))
    tell(event(key(1)))
    tell(event(key(0), key(3)))
    stored, removed = ("BlockStored", [-1]), ("BlockRemoved", [-1])
    assert told == [stored, removed, stored, ("BlockStored", [-2])]
    tell(event(key(4)))
    tell(event(removed=True))
    assert told[4:] == [removed, ("BlockRemoved", [-2])]
    # These chunks complete no block: chunks 3 and 4 were removed and not reported again.
    tell(event(key(5), key(2)))
    assert len(told) == 6


def test_a_port_in_use_is_an_error_that_names_the_option(
    publish: Make, endpoints: list[str]
) -> None:
    publish()
    with pytest.raises(ConfigError, match="'events_endpoint'.*a port of its own"):
        publish()


def test_a_missing_extra_is_an_error_that_says_how_to_get_it(
    publish: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier-sdk\[events\]'"):
        publish()
