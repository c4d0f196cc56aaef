"""Events that tell a request router which chunks a tier has stored or removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from kvtier_sdk.types import Locality, Medium, OffloadKey, make_offload_key, split_offload_key


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Reports that a tier has stored chunks, or has removed chunks if ``removed`` is true.

    Attributes:
        keys: the chunks' keys. Without keys, an event for routers concerns all chunks of the tier.
        tier: the tier's name; ``"host"`` for the primary tier.
        medium: the medium on which the tier keeps its chunks.
        locality: the machine that holds the chunks: the engine's or another.
        notes: each chunk's encoded :class:`ChunkNote`, or ``b""``; empty if no chunk has a note.
        session: the session of the request that stored the chunks, if the request named one.
    """

    keys: Sequence[OffloadKey]
    tier: str
    medium: Medium
    locality: Locality
    removed: bool
    notes: Sequence[bytes] = ()
    session: str | None = None


#: A function that receives an event for routers. Any thread may call it.
Announce: TypeAlias = Callable[[OffloadingEvent], None]


class ChunkNote(msgspec.Struct, array_like=True, omit_defaults=True):
    """The facts about a chunk's blocks that a router needs to match a prompt's prefix.

    Attributes:
        block_hashes: the last 64 bits of the hash of each block of the chunk, in order.
        parent_hash: the hash of the block before the chunk; ``None`` at the start of a prompt.
        token_ids: the blocks' tokens.
        block_tokens: number of tokens of a block.
        lora_name: the LoRA adapter for which the blocks were computed.
        kind: the KV-cache group's kind of attention, as vLLM names it.
    """

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_tokens: int
    lora_name: str | None = None
    kind: str | None = None

    def encode(self) -> bytes:
        """Return the note in MessagePack."""
        return msgspec.msgpack.encode(self)


_decode_note = msgspec.msgpack.Decoder(ChunkNote).decode


def read_note(key: OffloadKey, note: bytes) -> ChunkNote:
    """Decode a chunk's note. Treat a chunk without a note as one block, named by the key."""
    if not note:
        return ChunkNote([int.from_bytes(split_offload_key(key)[0][-8:], "big")], None, [], 0)
    try:
        return _decode_note(note)
    except msgspec.DecodeError:  # anyone who can write to the store can leave a malformed note
        return ChunkNote([], None, [], 0)


def parents_first(notes: Mapping[OffloadKey, bytes]) -> Iterator[OffloadKey]:
    """Yield the keys of ``notes``, each chunk after its parent if the parent has a note."""
    # The last blocks of the chunks not yet yielded, and the chunks that wait for such a block.
    to_come = {_ends(key, note)[1] for key, note in notes.items() if note} - {None}
    waiting: dict[int | None, list[OffloadKey]] = {}
    for first in notes:
        line = [first]
        while line:
            key = line.pop()
            parent, last = _ends(key, notes[key])
            if parent in to_come and parent != last:
                waiting.setdefault(parent, []).append(key)
                continue
            yield key
            to_come.discard(last)
            line += waiting.pop(last, ())
    for circle in waiting.values():  # malformed notes can name each other as parents
        yield from circle


def _ends(key: OffloadKey, note: bytes) -> list[int | None]:
    """Return a chunk's parent block and last block, as hashes that include the group."""
    read = read_note(key, note)
    blocks = [read.parent_hash, read.block_hashes[-1] if read.block_hashes else None]
    group = split_offload_key(key)[1]
    return [None if block is None else block << 32 | group for block in blocks]


def announce_blocks(
    announce: Announce, block_of: Callable[[OffloadKey], tuple[int, int, int] | None]
) -> Announce:
    """Return a function that receives the events of one tier's chunks and announces whole blocks.

    An engine needs this function if its chunks' keys do not name its blocks. A block counts as
    stored while the tier has all of the block's chunks.

    Args:
        announce: receives the events of the blocks.
        block_of: returns, for a chunk's key, the engine's 64-bit hash of the chunk's block, the
            KV-cache group, and the number of chunks in the block; ``None`` to skip the chunk.
    """
    # For each incomplete block, the number of chunks that the tier lacks.
    missing: dict[OffloadKey, int] = {}

    def announce_changes(event: OffloadingEvent) -> None:
        if not event.keys:
            missing.clear()
            announce(event)
            return
        told: dict[OffloadKey, bytes] = {}
        for key in event.keys:
            if (found := block_of(key)) is None:
                continue
            block, group, chunks = found
            name = make_offload_key((block % 2**64).to_bytes(8, "big"), group)
            left = missing.pop(name, 0 if event.removed else chunks)
            left += 1 if event.removed else -1
            # Announce a block that has just become complete, or has just ceased to be complete.
            if left == event.removed:
                told[name] = ChunkNote([block], None, [], 0).encode()
            if 0 < left < chunks:
                missing[name] = left
        if told:
            announce(replace(event, keys=list(told), notes=list(told.values())))

    return announce_changes


class EventLog:
    """Collects a tier's events until :meth:`take`, and announces them to routers immediately."""

    def __init__(
        self,
        tier: str,
        medium: Medium,
        locality: Locality,
        *,
        is_enabled: bool = False,
        announce: Announce | None = None,
    ) -> None:
        self.is_enabled = is_enabled
        self._announce = announce
        self._of = tier, medium, locality
        self._events: list[OffloadingEvent] = []

    @property
    def is_heard(self) -> bool:
        return self.is_enabled or self._announce is not None

    def add(
        self,
        keys: Sequence[OffloadKey],
        *,
        removed: bool,
        notes: Sequence[bytes] = (),
        session: str | None = None,
    ) -> None:
        if not keys or not self.is_heard:
            return
        event = OffloadingEvent(keys, *self._of, removed, notes, session)
        if self.is_enabled:
            self._events.append(event)
        if self._announce is not None:
            self._announce(event)

    def describe(self, key: OffloadKey, note: bytes) -> None:
        """Announce a stored chunk to routers again, now with its note."""
        if self._announce is not None:
            self._announce(OffloadingEvent([key], *self._of, False, [note]))

    def reset(self) -> None:
        """Announce that all chunks of the tier are gone."""
        if self._announce is not None:
            self._announce(OffloadingEvent((), *self._of, True))

    def take(self) -> list[OffloadingEvent]:
        taken, self._events = self._events, []
        return taken


#: The name of the primary tier in events and metrics.
PRIMARY = "host"
