"""Names of objects."""

from __future__ import annotations

import hashlib
import re

from kvtier_sdk import Namespace, OffloadKey

_SUFFIX = ".kv"


class Names:
    """The objects of one namespace below one prefix.

    ``<prefix>/<fingerprint>/<shard>/<key in hex>.kv`` is a chunk,
    ``<prefix>/<fingerprint>/manifest.json`` says what the namespace stands for. The shard is two
    hexadecimal digits of a hash of the key, as in the file tier: a server that keeps objects in
    directories is slow where one of them is large, and one that partitions by name spreads them.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        #: The beginning of the names of all objects of the namespace, and of no others.
        self.start = f"{prefix}/{namespace.fingerprint}/".removeprefix("/")
        self.manifest = self.manifest_in(self.start)
        #: The beginning of the names of all objects below the prefix.
        self.root = f"{prefix}/".removeprefix("/")
        #: The beginning of the names by which processes say that they live.
        self.sweepers = f"{self.root}sweepers/"
        self._chunk = re.compile(
            rf"{re.escape(self.root)}[0-9a-f]{{{len(namespace.fingerprint)}}}"
            rf"/[0-9a-f]{{2}}/[0-9a-f]*{re.escape(_SUFFIX)}"
        )

    @staticmethod
    def manifest_in(directory: str) -> str:
        """The manifest of the namespace whose objects' names begin with this."""
        return f"{directory}manifest.json"

    def of(self, key: OffloadKey) -> str:
        """The object of a chunk."""
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self.start}{shard}/{key.hex()}{_SUFFIX}"

    def is_chunk(self, name: str) -> bool:
        """Return true if an object holds a chunk, of any namespace below the prefix."""
        return self._chunk.fullmatch(name) is not None

    def key_in(self, name: str) -> OffloadKey | None:
        """The chunk that an object holds; ``None`` if it holds none."""
        _, _, last = name.rpartition("/")
        try:
            key = bytes.fromhex(last.removesuffix(_SUFFIX))
        except ValueError:
            return None
        # Only exactly as we write it: in its shard, without capitals or spaces.
        return key if self.of(key) == name else None
