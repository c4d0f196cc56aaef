"""The namespace: everything that must match for stored bytes to be reusable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvtier_sdk.chunk_header import HEADER_VERSION

_FINGERPRINT_HEX = 32


@dataclass(frozen=True, eq=False)
class Namespace:
    """The facts that decide whether a chunk's bytes can be reused, and their fingerprint.

    >>> ours = Namespace({"model": "llama", "dtype": "bfloat16"})
    >>> theirs = Namespace({"model": "llama", "dtype": "float16"})
    >>> ours == theirs
    False
    >>> ours.differences(theirs.manifest)
    {'dtype': ('bfloat16', 'float16')}

    Attributes:
        facts: name to value: engine, model and revision, dtype, KV layout, parallelism, tokens
            per block and per chunk, groups, hash algorithm and seed. Plain JSON values. The
            manifest adds the format version of the chunk header.
    """

    facts: Mapping[str, object]

    @cached_property
    def manifest(self) -> dict[str, object]:
        """The facts, in the form that a tier writes beside its chunks for people to read."""
        return {**self.facts, "frame_version": HEADER_VERSION}

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: SHA-256 of the manifest as canonical JSON, cut to 128 bits."""
        return hashlib.sha256(_canonical(self.manifest).encode()).hexdigest()[:_FINGERPRINT_HEX]

    def for_chunks(self, chunk_bytes: int) -> Namespace:
        """Add the length of a chunk's payload to the facts; a tier's chunks all have the same.

        Args:
            chunk_bytes: the length.

        Returns:
            The namespace whose fact ``chunk_bytes`` is that.
        """
        return Namespace({**self.facts, "chunk_bytes": chunk_bytes})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Namespace):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def manifest_json(self) -> str:
        """Return the text of a ``manifest.json``: the fingerprint and the facts, one a line."""
        document = {"fingerprint": self.fingerprint, "facts": self.manifest}
        return json.dumps(document, indent=2, sort_keys=True) + "\n"

    def differences(self, facts: Mapping[str, object]) -> dict[str, tuple[object, object]]:
        """Compare with the facts of another manifest, to explain why nothing is hit.

        Args:
            facts: the ``facts`` of a manifest that was read back.

        Returns:
            Name to (ours, theirs), only for facts that differ; a missing value is ``None``.
        """
        ours = json.loads(json.dumps(self.manifest))
        return {
            name: (ours.get(name), facts.get(name))
            for name in sorted(ours.keys() | facts.keys())
            if (name in ours) != (name in facts)
            or _canonical(ours.get(name)) != _canonical(facts.get(name))
        }


def _canonical(value: object) -> str:
    # 1, 1.0 and True are equal in Python, but not in JSON, and so not in a fingerprint.
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
