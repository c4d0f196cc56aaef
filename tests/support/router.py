"""A request router that follows an engine's events, and requests lost events again."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import zmq

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.event_publisher import EventOptions, EventPublisher


def free_endpoints() -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def publisher_at(endpoints: Sequence[str], topic: str = "", **options: Any) -> EventPublisher:
    events, replay = endpoints
    config = EventOptions(events_endpoint=events, events_replay_endpoint=replay, events_topic=topic)
    return EventPublisher(config, SystemClock(), **{"tokens": True, **options})


class Router:
    """A router for one engine. It loses each batch of events with the probability ``loss``."""

    def __init__(self, endpoint: str, replay: str, *, loss: float = 0.0, seed: int = 0) -> None:
        # How often the engine has stored each block, by medium, group and hash.
        self.blocks: Counter[tuple[str, int, int]] = Counter()
        self.events: list[dict[str, Any]] = []
        self.snapshots = 0
        self._loss, self._rng = loss, random.Random(seed)
        self._expected = 0
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(0)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._asks = self._context.socket(zmq.DEALER)
        self._asks.set_hwm(0)
        self._asks.connect(replay)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def listen(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self._live.poll(int(left_s * 1000)):
                _, head, batch = self._live.recv_multipart()
                if self._rng.random() >= self._loss:
                    self._hear(int.from_bytes(head, "big"), batch)

    def catch_up(self, duration_s: float = 2.5) -> None:
        """Listen without losses, by default long enough for two heartbeats."""
        loss, self._loss = self._loss, 0.0
        self.listen(duration_s)
        self._loss = loss

    def await_blocks(self, blocks: Iterable[int], medium: str = "STORAGE") -> None:
        """Listen until the engine has exactly these blocks on a medium."""
        wanted = set(blocks)
        end_s = time.monotonic() + 30
        while {block for at, _, block in self.blocks if at == medium} != wanted:
            assert time.monotonic() < end_s, (self.blocks, wanted)
            self.listen(0.2)

    def _hear(self, number: int, batch: bytes) -> None:
        if number > self._expected:
            self._asks.send_multipart([b"", self._expected.to_bytes(8, "big")])
            while True:
                assert self._asks.poll(20_000), "no answer"
                *_, head, missed = self._asks.recv_multipart()
                if not missed:
                    break
                self._believe(missed)
                self._expected = int.from_bytes(head, "big") + 1
        if number == self._expected:
            self._believe(batch)
            self._expected = number + 1

    def _believe(self, batch: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(batch)
        self.events += events
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.snapshots += 1
                self.blocks.clear()
                continue
            place = event["medium"], event["group_idx"]
            blocks = [(*place, block) for block in event["block_hashes"]]
            if event["type"] == "BlockStored":
                self.blocks.update(blocks)
                continue
            assert all(self.blocks[block] for block in blocks), "removed a block that is not there"
            self.blocks.subtract(blocks)
            self.blocks = +self.blocks

    def has(self, blocks: Iterable[int], medium: str = "STORAGE", group: int = 0) -> bool:
        return all(self.blocks[medium, group, block] for block in blocks)
