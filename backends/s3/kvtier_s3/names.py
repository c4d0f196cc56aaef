"""Names of objects in a bucket."""

from __future__ import annotations

import hashlib
import re

from kvtier_sdk import Namespace, OffloadKey

_SUFFIX = ".kv"


class Names:
    """The names of one namespace's objects below one prefix.

    ``<prefix>/<fingerprint>/<shard>/<key in hex>.kv`` is a chunk, and
    ``<prefix>/<fingerprint>/manifest.json`` describes the namespace. A shard is two hexadecimal
    digits of a hash of the key. Shards keep directories small on a server that stores objects as
    files, and spread the load on a server that partitions objects by name.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        #: The beginning of the names of this namespace's objects; ends with a slash.
        self.start = f"{prefix}/{namespace.fingerprint}/".removeprefix("/")
        self.manifest = self.manifest_in(self.start)
        #: The beginning of all object names; empty, or ends with a slash.
        self.root = f"{prefix}/".removeprefix("/")
        #: The beginning of the names of the objects that show which processes are alive.
        self.sweepers = f"{self.root}sweepers/"
        self._chunk = re.compile(
            rf"{re.escape(self.root)}[0-9a-f]{{{len(namespace.fingerprint)}}}"
            rf"/[0-9a-f]{{2}}/[0-9a-f]*{re.escape(_SUFFIX)}"
        )

    @staticmethod
    def manifest_in(directory: str) -> str:
        return f"{directory}manifest.json"

    def of(self, key: OffloadKey) -> str:
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self.start}{shard}/{key.hex()}{_SUFFIX}"

    def is_chunk(self, name: str) -> bool:
        """Return true if the object with this name is a chunk, of any namespace."""
        return self._chunk.fullmatch(name) is not None

    def key_in(self, name: str) -> OffloadKey | None:
        """Return the key of the chunk with this name; ``None`` for other objects."""
        _, _, last = name.rpartition("/")
        try:
            key = bytes.fromhex(last.removesuffix(_SUFFIX))
        except ValueError:
            return None
        # Compare the names, because fromhex accepts capitals and spaces and the shard may be wrong.
        return key if self.of(key) == name else None
