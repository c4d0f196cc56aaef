"""Names of objects."""

from __future__ import annotations

import hashlib

from kvtier_sdk import Namespace, OffloadKey

_SUFFIX = ".kv"


class Names:
    """The objects of one namespace below one prefix.

    ``<prefix>/<fingerprint>/<shard>/<key in hex>.kv`` is a chunk,
    ``<prefix>/<fingerprint>/manifest.json`` says what the namespace stands for. The shard is two
    hexadecimal digits of a hash of the key, as in the file tier: a server that keeps objects in
    directories is slow where one of them is large, and one that partitions by name spreads them.

    Args:
        prefix: the beginning of each name; may be empty.
        namespace: the namespace.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        #: The beginning of the names of all objects of the namespace, and of no others.
        self.start = f"{prefix}/{namespace.fingerprint}/".removeprefix("/")
        self.manifest = f"{self.start}manifest.json"

    def of(self, key: OffloadKey) -> str:
        """The object of a chunk."""
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self.start}{shard}/{key.hex()}{_SUFFIX}"

    def key_in(self, name: str) -> OffloadKey | None:
        """The chunk that an object holds; ``None`` if it holds none."""
        _, _, last = name.rpartition("/")
        try:
            key = bytes.fromhex(last.removesuffix(_SUFFIX))
        except ValueError:
            return None
        # Only exactly as we write it: in its shard, without capitals or spaces.
        return key if self.of(key) == name else None
