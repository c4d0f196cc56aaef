"""Events that tell a request router which chunks a tier has stored or removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvtier_sdk.types import Locality, Medium, OffloadKey, split_offload_key


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A notice that a tier has stored chunks, or has removed them if ``removed`` is true.

    Attributes:
        keys: the keys of the chunks; empty for all of the tier's chunks, which an endpoint for
            routers alone gets.
        tier: the tier's name; ``"host"`` for the primary tier.
        medium: the medium on which the tier keeps its chunks.
        locality: whether the tier keeps its chunks on the engine's machine or another machine.
        notes: for each of the chunks its encoded :class:`ChunkNote`, or ``b""``; or empty.
        session: the session of the request that stored the chunks, if the request named one.
    """

    keys: Sequence[OffloadKey]
    tier: str
    medium: Medium
    locality: Locality
    removed: bool
    notes: Sequence[bytes] = ()
    session: str | None = None


class ChunkNote(msgspec.Struct, array_like=True, omit_defaults=True):
    """The facts about a chunk's blocks by which a router finds a prompt's prefix.

    Attributes:
        block_hashes: the last 64 bits of the hash of each block of the chunk, in order.
        parent_hash: the hash of the block before them; ``None`` at the begin of a prompt.
        token_ids: the blocks' tokens.
        block_tokens: number of tokens of a block.
        lora_name: the adapter for which the blocks were computed.
        kind: vLLM's name of the KV-cache group's kind of attention.
    """

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_tokens: int
    lora_name: str | None = None
    kind: str | None = None

    def encode(self) -> bytes:
        """Return the note as bytes."""
        return msgspec.msgpack.encode(self)


_decode_note = msgspec.msgpack.Decoder(ChunkNote).decode


def read_note(key: OffloadKey, note: bytes) -> ChunkNote:
    """Decode a chunk's note; a chunk without a note is one block, named by its key.

    A malformed note, which anyone who can write to the store may leave there, names no block.
    """
    if not note:
        return ChunkNote([int.from_bytes(split_offload_key(key)[0][-8:], "big")], None, [], 0)
    try:
        return _decode_note(note)
    except msgspec.DecodeError:
        return ChunkNote([], None, [], 0)


class PrefixOrder:
    """The order of chunks in which each follows its parent."""

    def __init__(self) -> None:
        # The hash of each chunk's parent, and the chunk that ends with a hash, by group.
        self._parents: dict[OffloadKey, int | None] = {}
        self._by_end: dict[tuple[int | None, bytes], OffloadKey] = {}

    def add(self, key: OffloadKey, note: bytes) -> None:
        read = read_note(key, note)
        if read.block_hashes:
            self._parents[key] = read.parent_hash
            self._by_end[read.block_hashes[-1], key[-4:]] = key

    def sort(self, keys: Iterable[OffloadKey]) -> Iterator[OffloadKey]:
        """Yield the chunks and their ancestors in order; chunks that were not added keep theirs."""
        done: set[OffloadKey] = set()
        for key in keys:
            line = []
            ancestor: OffloadKey | None = key
            while ancestor is not None and ancestor not in done:
                done.add(ancestor)
                line.append(ancestor)
                ancestor = self._by_end.get((self._parents.get(ancestor), ancestor[-4:]))
            yield from reversed(line)


class EventLog:
    """A list of one tier's events since the last call of :meth:`take`.

    Each event also goes to ``announce``, which passes it to routers, if there is such a function.
    """

    def __init__(
        self,
        tier: str,
        medium: Medium,
        locality: Locality,
        *,
        is_enabled: bool,
        announce: Callable[[OffloadingEvent], None] | None = None,
    ) -> None:
        self.is_enabled = is_enabled
        self._announce = announce
        self._of = tier, medium, locality
        self._events: list[OffloadingEvent] = []

    def add(
        self,
        keys: Sequence[OffloadKey],
        *,
        removed: bool,
        notes: Sequence[bytes] = (),
        session: str | None = None,
    ) -> None:
        if not keys or not (self.is_enabled or self._announce):
            return
        event = OffloadingEvent(keys, *self._of, removed, notes, session)
        if self.is_enabled:
            self._events.append(event)
        if self._announce is not None:
            self._announce(event)

    def reset(self) -> None:
        """Announce that all chunks of the tier are gone."""
        if self._announce is not None:
            self._announce(OffloadingEvent((), *self._of, True))

    def take(self) -> list[OffloadingEvent]:
        taken, self._events = self._events, []
        return taken


#: The name of the primary tier in events and metrics.
PRIMARY = "host"
