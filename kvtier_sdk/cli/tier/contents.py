"""Counts the chunks and bytes of a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier_sdk.cli.tier.maintenance import chunk_bytes_of, open_for_maintenance
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.units import format_bytes


@dataclass(slots=True)
class Contents:
    """The size of a namespace, and its chunks' oldest and latest use in epoch seconds."""

    namespace: Namespace
    chunks: int = 0
    used_bytes: int = 0
    oldest_s: float | None = None
    last_used_s: float | None = None

    @classmethod
    def of(cls, spec: TierSpec, namespace: Namespace, timeout_s: float) -> Contents:
        contents = cls(namespace)
        with open_for_maintenance(spec, namespace, timeout_s=timeout_s) as tier:
            for entry in tier.entries():
                contents.add(entry.object_bytes, entry.used_s)
        return contents

    def add(self, object_bytes: int, used_s: float | None) -> None:
        self.chunks += 1
        self.used_bytes += object_bytes
        if used_s is not None:
            self.oldest_s = used_s if self.oldest_s is None else min(self.oldest_s, used_s)
            self.last_used_s = used_s if self.last_used_s is None else max(self.last_used_s, used_s)

    @property
    def plain_bytes(self) -> int | None:
        """Total length of the chunks when loaded; ``None`` if the facts lack a chunk's length."""
        chunk_bytes = chunk_bytes_of(self.namespace)
        return None if chunk_bytes is None else self.chunks * chunk_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.namespace.fingerprint,
            "facts": self.namespace.manifest,
            "manifest_fault": getattr(self.namespace, "fault", "") or None,
            "chunks": self.chunks,
            **sizes_as_json(self.used_bytes, self.plain_bytes),
            "oldest_s": self.oldest_s,
            "last_used_s": self.last_used_s,
        }


def sizes_as_json(stored_bytes: int, plain_bytes: int | None) -> dict[str, float | None]:
    ratio = plain_bytes / stored_bytes if plain_bytes and stored_bytes else None
    return {"bytes": stored_bytes, "plain_bytes": plain_bytes, "ratio": ratio}


def sizes_in_words(stored_bytes: int, plain_bytes: int | None) -> str:
    """Return text such as ``"20 MiB"``, or ``"20 MiB (30 MiB / 1.50)"`` for compressed chunks."""
    words = format_bytes(stored_bytes)
    if plain_bytes is None or not 0 < stored_bytes < plain_bytes:
        return words
    return f"{words} ({format_bytes(plain_bytes)} / {plain_bytes / stored_bytes:.2f})"
