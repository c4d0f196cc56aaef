"""What objects are called."""

from __future__ import annotations

from kvtier_sdk import Namespace, OffloadKey

_SUFFIX = ".kv"


class Names:
    """The objects of one namespace below one prefix.

    ``<prefix>/<fingerprint>/<key in hex>.kv`` is a chunk, ``<prefix>/<fingerprint>/manifest.json``
    says what the namespace stands for. Keys are hashes, so that the load spreads evenly over
    whatever a server partitions by.

    Args:
        prefix: what each begins with; may be empty.
        namespace: the namespace.
    """

    def __init__(self, prefix: str, namespace: Namespace) -> None:
        #: What all objects of the namespace begin with, and no others.
        self.start = f"{prefix}/{namespace.fingerprint}/".removeprefix("/")
        self.manifest = f"{self.start}manifest.json"

    def of(self, key: OffloadKey) -> str:
        """The object of a chunk."""
        return f"{self.start}{key.hex()}{_SUFFIX}"

    def key_in(self, name: str) -> OffloadKey | None:
        """The chunk that an object holds; ``None`` where it holds none."""
        middle = name.removeprefix(self.start).removesuffix(_SUFFIX)
        try:
            key = bytes.fromhex(middle)
        except ValueError:
            return None
        # Exactly as we write it: no capitals, no spaces.
        return key if self.of(key) == name else None
