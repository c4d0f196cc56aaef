"""Names of chunks in a store of named objects, such as a bucket."""

from __future__ import annotations

import hashlib
import re

from kvtier_sdk.namespace import Namespace
from kvtier_sdk.types import OffloadKey

_SUFFIX = ".kv"


class ObjectNames:
    """The names of one namespace's objects below one prefix.

    ``<prefix>/<fingerprint>/<shard>/<key in hex>.kv`` is a chunk, and
    ``<prefix>/<fingerprint>/manifest.json`` describes the namespace. A shard is two hexadecimal
    digits of a hash of the key. Shards keep directories small if a server stores objects as files,
    and spread the load if a server partitions objects by name.

    >>> names = ObjectNames("kv", Namespace({"model": "llama"}))
    >>> names.of(b"key").removeprefix(names.start)
    '33/6b6579.kv'
    >>> names.key_in(names.of(b"key"))
    b'key'

    Args:
        prefix: the beginning of all names, without a leading or trailing slash; may be empty.
        namespace: the namespace of the chunks.

    Attributes:
        root: the beginning of all namespaces' names; empty, or ends with a slash.
        start: the beginning of this namespace's names; ends with a slash.
        manifest: the name of this namespace's manifest.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        self.root: str = f"{prefix}/".removeprefix("/")
        self.start: str = f"{self.root}{namespace.fingerprint}/"
        self.manifest: str = self.manifest_of(namespace.fingerprint)
        self._chunk = re.compile(
            rf"{re.escape(self.root)}[0-9a-f]{{{len(namespace.fingerprint)}}}"
            rf"/[0-9a-f]{{2}}/[0-9a-f]*{re.escape(_SUFFIX)}"
        )

    def manifest_of(self, fingerprint: str) -> str:
        """Return the name of the manifest of the namespace with this ``fingerprint``."""
        return f"{self.root}{fingerprint}/manifest.json"

    def of(self, key: OffloadKey) -> str:
        """Return the name of the chunk under ``key``."""
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self.start}{shard}/{key.hex()}{_SUFFIX}"

    def is_chunk(self, name: str) -> bool:
        """Return true if the object called ``name`` is a chunk, of any namespace."""
        return self._chunk.fullmatch(name) is not None

    def key_in(self, name: str) -> OffloadKey | None:
        """Return the key of the chunk called ``name``; return ``None`` for other objects."""
        try:
            key = bytes.fromhex(name.rpartition("/")[2].removesuffix(_SUFFIX))
        except ValueError:
            return None
        # Compare the names, because ``fromhex`` accepts other spellings and ignores the shard.
        return key if self.of(key) == name else None
