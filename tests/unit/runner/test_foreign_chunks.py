from __future__ import annotations

from kvtier_sdk.runner import foreign_chunks
from kvtier_sdk.runner.foreign_chunks import ForeignChunks

KEY = b"key"


def test_a_foreign_chunk_is_replaced_once() -> None:
    chunks = ForeignChunks()
    assert not chunks.is_to_replace(KEY)
    for _ in range(2):  # two requests found it before one stored it
        chunks.note_found(KEY)
        assert chunks.is_to_replace(KEY)
    chunks.note_replaced(KEY)
    assert not chunks.is_to_replace(KEY)
    assert not chunks.is_left(KEY)
    for _ in range(2):
        chunks.note_found(KEY)
        assert chunks.is_left(KEY)
        assert not chunks.is_to_replace(KEY)


def test_only_so_many_are_remembered() -> None:
    chunks = ForeignChunks()
    for number in range(foreign_chunks._MAX_CHUNKS + 1):
        chunks.note_found(number.to_bytes(4, "big"))
    assert not chunks.is_to_replace((0).to_bytes(4, "big"))
    assert chunks.is_to_replace((1).to_bytes(4, "big"))
    assert len(chunks._states) == foreign_chunks._MAX_CHUNKS
