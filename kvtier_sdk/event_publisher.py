"""Announces the tiers' chunks to request routers over ZeroMQ, as KV events in vLLM's format."""

from __future__ import annotations

import logging
import threading
from collections import ChainMap, Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeAlias

import msgspec
from pydantic import Field

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.events import Announce, ChunkNote, OffloadingEvent, parents_first, read_note
from kvtier_sdk.options.model import StrictModel
from kvtier_sdk.types import Locality, Medium, OffloadKey, split_offload_key

#: Interval at which the thread checks for events.
_TURN_MS = 50
#: After this time without events, an empty batch is sent, so that routers notice lost batches.
_HEARTBEAT_S = 1.0
_BATCH_EVENTS = 512
#: Keep sent batches up to these limits, because routers may request lost batches.
_MOST_KEPT = 10_000
_MOST_KEPT_BYTES = 64 << 20
#: The maximum number of unread batches that each socket queues for a slow router.
_MOST_UNREAD = 1000
_MOST_UNREAD_ANSWERS = 16
#: An answer is abandoned if the router reads no batch for this long.
_PATIENCE_MS = 5000
#: The sequence number that marks the end of an answer to a router.
_END = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger("kvtier.events")
_encode = msgspec.msgpack.Encoder().encode

_Event: TypeAlias = dict[str, Any]


class AnnouncedChunks:
    """Converts the tiers' events to router events, and tracks the announced chunks.

    A block is announced when its first copy on a medium and locality is stored, and withdrawn when
    the last copy there is gone. So the events work whether or not a router counts copies.
    """

    def __init__(self, *, tokens: bool) -> None:
        self._tokens = tokens
        # Each tier's chunks with their notes, and each tier's place: its medium and locality.
        self._tiers: dict[str, dict[OffloadKey, bytes]] = {}
        self._places: dict[str, tuple[Medium, Locality]] = {}
        # For each place and group, the number of copies of each announced block.
        self._copies: dict[tuple[object, int], Counter[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))

    def apply(self, event: OffloadingEvent) -> Iterator[_Event]:
        tier = event.tier
        self._places[tier] = event.medium, event.locality
        own = self._tiers.setdefault(tier, {})
        if event.removed:
            for key in event.keys or list(own):
                if key in own:
                    yield from self._withdraw(tier, key, own.pop(key))
            return
        notes = (self._tokens and event.notes) or [b""] * len(event.keys)
        for key, told in zip(event.keys, notes, strict=True):
            note = next(filter(None, (chunks.get(key) for chunks in self._tiers.values())), told)
            for name, chunks in self._tiers.items():
                is_new = name == tier and key not in chunks
                if is_new or (note and chunks.get(key) == b""):
                    chunks[key] = note
                    yield from self._announce(name, key, note, event.session)

    def snapshot(self) -> Iterator[_Event]:
        """Yield events that clear a router's index and fill it with all announced chunks."""
        yield {"type": "AllBlocksCleared"}
        copies, self._copies = self._copies, {}
        try:
            for key in parents_first(ChainMap(*self._tiers.values())):
                for tier, chunks in self._tiers.items():
                    if key in chunks:
                        yield from self._announce(tier, key, chunks[key])
        finally:
            self._copies = copies

    def _announce(
        self, tier: str, key: OffloadKey, note: bytes, session: str | None = None
    ) -> Iterator[_Event]:
        blocks, place, copies = self._blocks(tier, key, note)
        hashes = blocks.block_hashes
        # The announced blocks come first, because a block's hash covers all blocks before it.
        known = next((n for n, block in enumerate(hashes) if block not in copies), len(hashes))
        copies.update(hashes)
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
        copies.subtract(blocks.block_hashes)
        gone = [block for block in blocks.block_hashes if not copies[block]]
        for block in gone:
            del copies[block]
        if gone:
            yield {"type": "BlockRemoved", "block_hashes": gone, **place}

    def _blocks(
        self, tier: str, key: OffloadKey, note: bytes
    ) -> tuple[ChunkNote, _Event, Counter[int]]:
        group = split_offload_key(key)[1]
        medium, locality = place = self._places[tier]
        is_told = note or not self._tokens
        blocks = read_note(key, note) if is_told else ChunkNote([], None, [], 0)
        told = {"medium": medium.value, "group_idx": group, "locality": locality.value}
        return blocks, told, self._copies.setdefault((place, group), Counter())


class EventOptions(StrictModel):
    """An engine's options for announcing chunks to request routers.

    Attributes:
        events_endpoint: address at which request routers receive announcements of chunks, such as
            ``tcp://*:5557``; no announcements if absent.
        events_replay_endpoint: address at which routers request lost events, or all chunks, such as
            ``tcp://*:5558``.
        events_topic: topic of the events.
    """

    events_endpoint: str | None = Field(None, min_length=1)
    events_replay_endpoint: str | None = Field(None, min_length=1)
    events_topic: str = ""


class EventPublisher:
    """Publishes events to request routers, in a separate thread.

    The protocol is vLLM's. A PUB socket sends batches, each with a topic and a sequence number. A
    ROUTER socket receives a number, and answers with all batches from this number on. If some of
    these are no longer kept, it answers with a snapshot. The first sequence number is the time of
    the start, so a router notices when a new engine replaces an old engine.

    Args:
        options: the topic and the endpoints; ``events_endpoint`` is required.
        clock: the source of time.
        rank: the engine's data-parallel rank, which is added to both ports.
        tokens: false to announce only hashes; true to add tokens, and skip chunks without notes.

    Raises:
        ConfigError: the extra ``events`` is not installed, or an endpoint cannot be used.
    """

    def __init__(
        self, options: EventOptions, clock: Clock, *, rank: int = 0, tokens: bool = False
    ) -> None:
        try:
            import zmq
        except ModuleNotFoundError:
            raise ConfigError(
                "option 'events_endpoint' needs zmq: pip install 'kvtier-sdk[events]'"
            ) from None
        self._clock = clock
        self._topic = options.events_topic.encode()
        self._rank = rank
        self._chunks = AnnouncedChunks(tokens=tokens)
        self._events: deque[OffloadingEvent] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = int(clock.wall_s() * 1e6)
        self._beat_s = 0.0
        self._source: object = None
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "events_endpoint", options)
            self._router = None
            if options.events_replay_endpoint is not None:
                self._router = self._bind(zmq.ROUTER, "events_replay_endpoint", options)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def put(self, event: OffloadingEvent) -> None:
        """Queue an event; any thread may call this."""
        self._events.append(event)

    def source(self) -> Announce:
        """Return a function like :meth:`put` that does nothing once there is a newer source.

        An engine that reopens its tiers needs a new source, because the old tiers may still report.
        """
        source = self._source = object()

        def announce(event: OffloadingEvent) -> None:
            if self._source is source:
                self.put(event)

        return announce

    def close(self) -> None:
        """Publish the queued events, and end the thread."""
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=100)

    def _bind(self, kind: int, option: str, options: EventOptions) -> Any:
        import zmq

        socket = self._context.socket(kind)
        # A slow router loses new batches, and requests them later. The short queue for answers
        # makes this thread wait until the router reads.
        socket.set_hwm(_MOST_UNREAD)
        if kind == zmq.ROUTER:
            socket.set_hwm(_MOST_UNREAD_ANSWERS)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDTIMEO, _PATIENCE_MS)
        endpoint = getattr(options, option)
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
        while not self._ending.is_set():
            try:
                if self._router is None:
                    self._ending.wait(_TURN_MS / 1000)
                elif self._router.poll(_TURN_MS):
                    self._answer(self._router)
                self._publish()
                if self._clock.now_s() >= self._beat_s:
                    self._send([])
            except Exception:
                _log.exception("routers miss some events")
        self._publish()

    def _publish(self) -> None:
        events: list[_Event] = []
        while self._events:
            for event in self._chunks.apply(self._events.popleft()):
                events.append(event)
                if len(events) == _BATCH_EVENTS:
                    self._send(events)
                    events = []
        if events:
            self._send(events)

    def _send(self, events: list[_Event]) -> None:
        self._beat_s = self._clock.now_s() + _HEARTBEAT_S
        batch = self._batch(events)
        self._kept.append((self._next, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _MOST_KEPT or self._kept_bytes > _MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart([self._topic, self._next.to_bytes(8, "big"), batch])
        self._next += 1

    def _batch(self, events: list[_Event]) -> bytes:
        return _encode([self._clock.wall_s(), events, self._rank])

    def _answer(self, router: Any) -> None:
        import zmq

        self._publish()
        asker, *_, start_bytes = router.recv_multipart()
        start = int.from_bytes(start_bytes, "big")
        has_all = start >= self._next or (self._kept and self._kept[0][0] <= start)
        kept = (one for one in self._kept if one[0] >= start)
        try:
            for number, batch in kept if has_all else self._snapshot():
                head = number.to_bytes(8, "big")
                router.send_multipart([asker, b"", self._topic, head, batch])
                if self._ending.is_set():
                    return
            router.send_multipart([asker, b"", b"", _END, b""])
        except zmq.ZMQError as error:
            _log.debug("a router does not read its answer: %s", error)

    def _snapshot(self) -> Iterator[tuple[int, bytes]]:
        """Yield a snapshot in batches; the final one has the number of the newest sent batch."""
        events = self._chunks.snapshot()
        most = 1 + len(self._chunks) // _BATCH_EVENTS
        for number in range(self._next - most, self._next):
            yield number, self._batch([*islice(events, _BATCH_EVENTS)])
