"""Chunks of prompts that share prefixes, with contents in bfloat16."""

from __future__ import annotations

import random
from collections import deque

from xxhash import xxh3_128_digest

from kvtier_sdk.types import OffloadKey, make_offload_key

_CONVERSATIONS = 6


class ChunkTree:
    """A tree of prompts. Each letter of a path is one chunk in each KV-cache group."""

    def __init__(self, groups: int, depth: int, chunk_bytes: int, rng: random.Random) -> None:
        self.content: dict[OffloadKey, bytes] = {}
        self.groups = groups
        self._keys: dict[bytes, list[OffloadKey]] = {}
        self._depth = depth
        self._chunk_bytes = chunk_bytes
        self._rng = rng
        self._conversations: deque[bytes] = deque(maxlen=_CONVERSATIONS)

    def new_path(self) -> bytes:
        """Return the path of a new, a repeated or a continued conversation."""
        if self._conversations and self._rng.random() < 0.6:
            path = self._rng.choice(self._conversations)
            # Do not continue a conversation that is twice as long as the longest new conversation.
            if len(path) < 2 * self._depth and self._rng.random() < 0.5:
                return self.longer(path)
            return path
        path = b""
        for _ in range(self._rng.randint(1, self._depth)):
            path = self.longer(path)
        return path

    def longer(self, path: bytes) -> bytes:
        return path + self._rng.choices((b"a", b"b", b"c"), (5, 4, 1))[0]

    def ended(self, path: bytes) -> None:
        self._conversations.append(path)

    def keys(self, path: bytes) -> list[OffloadKey]:
        keys = self._keys.get(path)
        if keys is None:
            keys = self._keys[path] = self._make_keys(path)
        return keys

    def _make_keys(self, path: bytes) -> list[OffloadKey]:
        keys = []
        for end in range(1, len(path) + 1):
            digest = 2 * xxh3_128_digest(path[:end])
            keys += [make_offload_key(digest, group) for group in range(self.groups)]
        for key in keys:
            if key not in self.content:
                self.content[key] = _content_of(key, self._chunk_bytes)
        return keys


def _content_of(key: OffloadKey, chunk_bytes: int) -> bytes:
    """Return random content. Some chunks compress well, some badly, and some not at all."""
    rng = random.Random(key)
    content = bytearray(rng.randbytes(chunk_bytes))
    rare = rng.choice((0, 5, 10, 50))
    # Only the second byte of an element compresses: it has the sign and most of the exponent.
    content[1::2] = rng.choices(range(0x3A, 0x40), (100, *[rare] * 5), k=chunk_bytes // 2)
    return bytes(content)
