"""Tells request routers over ZeroMQ which chunks the tiers have, in vLLM's format of KV events."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeAlias

import msgspec

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.events import ChunkNote, OffloadingEvent, PrefixOrder, read_note
from kvtier_sdk.types import Locality, Medium, OffloadKey, split_offload_key

#: The thread looks for events this often, and sends a batch this often even without an event, so
#: that a router notices what it has missed.
_TURN_MS = 50
_HEARTBEAT_S = 1.0
_BATCH_EVENTS = 512
_MOST_UNREAD = 1000
#: The end of an answer to a router.
_END = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger("kvtier.events")
_encode = msgspec.msgpack.Encoder().encode


_Event: TypeAlias = dict[str, Any]
_Place: TypeAlias = tuple[Medium, Locality]

_UNKNOWN: tuple[frozenset[str], bytes] = frozenset(), b""


class AnnouncedChunks:
    """The chunks that routers believe the tiers to have.

    It turns tiers' events into a router's. A block is announced once for each medium and locality,
    however many tiers and chunks have it there, and withdrawn with the last of them, so that the
    events are right for routers that count and for those that do not.

    Args:
        tokens: true to announce only chunks with a note, with their tokens; false to announce the
            hashes alone.
    """

    def __init__(self, *, tokens: bool) -> None:
        self._tokens = tokens
        # For each chunk, the names of the tiers that have it, and its note.
        self._chunks: dict[OffloadKey, tuple[frozenset[str], bytes]] = {}
        self._places: dict[str, _Place] = {}
        # For each place and group, how many copies there are of each announced block.
        self._copies: dict[tuple[_Place, int], dict[int, int]] = {}

    def apply(self, event: OffloadingEvent) -> Iterator[_Event]:
        """Yield the router's events that follow from a tier's ``event``."""
        tier = event.tier
        self._places[tier] = event.medium, event.locality
        if not event.removed:
            notes = event.notes or [b""] * len(event.keys)
            for key, note in zip(event.keys, notes, strict=True):
                yield from self._stored(tier, key, note, event.session)
            return
        keys = event.keys or [key for key, (tiers, _) in self._chunks.items() if tier in tiers]
        for key in keys:
            tiers, note = self._chunks.get(key, _UNKNOWN)
            if tier in tiers:
                yield from self._withdraw(tier, key, note)
                self._chunks[key] = tiers - {tier}, note
                if len(tiers) == 1:
                    del self._chunks[key]

    def snapshot(self) -> Iterator[_Event]:
        """Yield the events after which a router knows all announced chunks and no others."""
        yield {"type": "AllBlocksCleared"}
        copies, self._copies = self._copies, {}
        order = PrefixOrder()
        for key, (_, note) in self._chunks.items():
            if note:
                order.add(key, note)
        for key in order.sort(self._chunks):
            tiers, note = self._chunks[key]
            for tier in sorted(tiers):
                yield from self._announce(tier, key, note)
        self._copies = copies

    def _stored(
        self, tier: str, key: OffloadKey, note: bytes, session: str | None
    ) -> Iterator[_Event]:
        tiers, known = self._chunks.get(key, _UNKNOWN)
        if self._tokens and note and not known:
            known = note
            for other in sorted(tiers):
                yield from self._announce(other, key, note)
        if tier not in tiers:
            yield from self._announce(tier, key, known, session)
        self._chunks[key] = tiers | {tier}, known

    def _announce(
        self, tier: str, key: OffloadKey, note: bytes, session: str | None = None
    ) -> Iterator[_Event]:
        blocks, place, copies = self._blocks(tier, key, note)
        hashes = blocks.block_hashes
        # Chunks share leading blocks only, because a block's hash stands for all before it.
        known = next((n for n, block in enumerate(hashes) if block not in copies), len(hashes))
        for block in hashes:
            copies[block] = copies.get(block, 0) + 1
        if known < len(hashes):
            optional = {"kv_cache_spec_kind": blocks.kind, "session_id": session}
            yield {
                "type": "BlockStored",
                "block_hashes": hashes[known:],
                "parent_block_hash": hashes[known - 1] if known else blocks.parent_hash,
                "token_ids": blocks.token_ids[known * blocks.block_tokens :],
                "block_size": blocks.block_tokens,
                "lora_id": None,
                "lora_name": blocks.lora_name,
                **place,
                **{name: value for name, value in optional.items() if value is not None},
            }

    def _withdraw(self, tier: str, key: OffloadKey, note: bytes) -> Iterator[_Event]:
        blocks, place, copies = self._blocks(tier, key, note)
        gone = [block for block in blocks.block_hashes if copies[block] == 1]
        for block in blocks.block_hashes:
            copies[block] -= 1
        for block in gone:
            del copies[block]
        if gone:
            yield {"type": "BlockRemoved", "block_hashes": gone, **place}

    def _blocks(
        self, tier: str, key: OffloadKey, note: bytes
    ) -> tuple[ChunkNote, _Event, dict[int, int]]:
        group = split_offload_key(key)[1]
        medium, locality = place = self._places[tier]
        is_told = note or not self._tokens
        blocks = read_note(key, note) if is_told else ChunkNote([], None, [], 0)
        told = {"medium": medium.value, "group_idx": group, "locality": locality.value}
        return blocks, told, self._copies.setdefault((place, group), {})


class _Store(Protocol):
    def take_inventory(self) -> Iterable[OffloadingEvent]: ...


class EventPublisher:
    """A publisher of events for routers, in a thread of its own.

    It speaks as vLLM's own: batches on a PUB socket, each with a topic and a sequence number, and
    a ROUTER socket that answers a number with the batches since then. A router that asks for more
    than is kept, such as a new one, gets a snapshot instead. Numbers begin with the time, so that a
    router that outlives its engine notices the new one.

    Args:
        endpoint: where to publish, such as ``tcp://*:5557``.
        replay_endpoint: where routers ask for what they have missed; ``None`` for nowhere.
        topic: the topic of all batches.
        tokens: as for :class:`AnnouncedChunks`.
        rank: the engine's number among data-parallel ones, which is added to both ports.
        clock: the source of time.
        kept_batches: number of batches that are kept for a router that has missed some.
        kept_bytes: the most bytes of these batches.

    Raises:
        ConfigError: the extra ``events`` is not installed, or an endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: str,
        tokens: bool,
        rank: int,
        clock: Clock,
        kept_batches: int = 10_000,
        kept_bytes: int = 64 << 20,
    ) -> None:
        try:
            import zmq
        except ModuleNotFoundError:
            raise ConfigError(
                "option 'events_endpoint' needs zmq: pip install 'kvtier-sdk[events]'"
            ) from None
        self._clock = clock
        self._topic = topic.encode()
        self._rank = rank
        self._chunks = AnnouncedChunks(tokens=tokens)
        self._events: deque[OffloadingEvent] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._most_batches, self._left_bytes = kept_batches, kept_bytes
        self._next = int(clock.wall_s() * 1e6)
        #: Returns the tiers whose inventories the thread takes.
        self.stores: Callable[[], Iterable[_Store]] = lambda: ()
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "events_endpoint", endpoint)
            self._router = None
            if replay_endpoint is not None:
                self._router = self._bind(zmq.ROUTER, "events_replay_endpoint", replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def put(self, event: OffloadingEvent) -> None:
        """Queue an event; any thread may call this."""
        self._events.append(event)

    def close(self) -> None:
        """Publish what is queued, and end the thread."""
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=100)

    def _bind(self, kind: int, option: str, endpoint: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        # A router that is slow to read its snapshot must get all of it. A router that is slow to
        # read the batches loses some, and asks for them.
        socket.set_hwm(0 if kind == zmq.ROUTER else _MOST_UNREAD)
        head, colon, port = endpoint.rpartition(":")
        if port.isdecimal():
            endpoint = f"{head}{colon}{int(port) + self._rank}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"option '{option}': cannot listen on {endpoint!r}: {error}; write for example "
                "'tcp://*:5557', and give each engine of a machine a port of its own"
            ) from None
        return socket

    def _run(self) -> None:
        next_beat_s = 0.0
        while not self._ending.is_set():
            try:
                if self._router is None:
                    self._ending.wait(_TURN_MS / 1000)
                elif self._router.poll(_TURN_MS):
                    self._answer(self._router)
                for store in self.stores():
                    self._events += store.take_inventory()
                is_due = self._clock.now_s() >= next_beat_s
                if is_due:
                    next_beat_s = self._clock.now_s() + _HEARTBEAT_S
                self._publish(at_least=int(is_due))
            except Exception:
                _log.exception("routers miss some events")
        self._publish()

    def _publish(self, at_least: int = 0) -> None:
        events: list[_Event] = []
        while self._events:
            events += self._chunks.apply(self._events.popleft())
            if len(events) >= _BATCH_EVENTS:
                self._send(events)
                events, at_least = [], 0
        if events or at_least:
            self._send(events)

    def _send(self, events: list[_Event]) -> None:
        batch = self._batch(events)
        self._kept.append((self._next, batch))
        self._left_bytes -= len(batch)
        while len(self._kept) > self._most_batches or self._left_bytes < 0:
            self._left_bytes += len(self._kept.popleft()[1])
        self._pub.send_multipart([self._topic, self._next.to_bytes(8, "big"), batch])
        self._next += 1

    def _batch(self, events: list[_Event]) -> bytes:
        return _encode([self._clock.wall_s(), events, self._rank])

    def _answer(self, router: Any) -> None:
        """Answer a router's number with the batches since then, or with a snapshot."""
        self._publish()
        asker, *_, start_bytes = router.recv_multipart()
        start = int.from_bytes(start_bytes, "big")
        batches = [(number, batch) for number, batch in self._kept if number >= start]
        if start < self._next and (not batches or batches[0][0] > start):
            snapshot = [*self._snapshot()]
            first = self._next - len(snapshot)
            batches = list(enumerate(snapshot, first))
        for number, batch in [*batches, (-1, b"")]:
            head = _END if number < 0 else number.to_bytes(8, "big")
            topic = self._topic if batch else b""
            router.send_multipart([asker, b"", topic, head, batch])

    def _snapshot(self) -> Iterator[bytes]:
        events = self._chunks.snapshot()
        while part := [*islice(events, _BATCH_EVENTS)]:
            yield self._batch(part)
