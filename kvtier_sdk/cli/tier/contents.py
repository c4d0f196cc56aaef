"""The chunks in a namespace of a tier, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening.maintenance import MaintainedTier, open_for_maintenance
from kvtier_sdk.types import Capability


@dataclass(slots=True)
class Contents:
    """The chunks of one namespace.

    Attributes:
        namespace: the namespace.
        chunks: number of chunks.
        used_bytes: size of the chunks, headers included.
        oldest_s: last use of the least recently used chunk, in seconds since the epoch; ``None`` if
            the store does not know.
        last_used_s: last use of the most recently used chunk, likewise.
    """

    namespace: Namespace
    chunks: int = 0
    used_bytes: int = 0
    oldest_s: float | None = None
    last_used_s: float | None = None

    def add(self, object_bytes: int, used_s: float | None) -> None:
        """Count a chunk."""
        self.chunks += 1
        self.used_bytes += object_bytes
        if used_s is not None:
            self.oldest_s = used_s if self.oldest_s is None else min(self.oldest_s, used_s)
            self.last_used_s = used_s if self.last_used_s is None else max(self.last_used_s, used_s)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "fingerprint": self.namespace.fingerprint,
            "facts": self.namespace.manifest,
            "manifest_fault": getattr(self.namespace, "fault", "") or None,
            "chunks": self.chunks,
            "bytes": self.used_bytes,
            "oldest_s": self.oldest_s,
            "last_used_s": self.last_used_s,
        }


def count(spec: TierSpec, namespace: Namespace, timeout_s: float) -> Contents:
    """Count the chunks of a namespace.

    Raises:
        ConfigError: the backend cannot list its chunks.
        TierError: the tier cannot be read.
    """
    contents = Contents(namespace)
    with open_for_maintenance(spec, namespace, timeout_s=timeout_s) as tier:
        need(tier, Capability.SCAN, "list its chunks")
        for entry in tier.entries():
            contents.add(entry.object_bytes, entry.used_s)
    return contents


def need(tier: MaintainedTier, capability: Capability, doing: str) -> None:
    """Check that a tier has a capability.

    Raises:
        ConfigError: the tier lacks it.
    """
    if not tier.can(capability):
        spec = tier.spec
        raise ConfigError(f"tier {spec.name!r}: backend {spec.backend!r} cannot {doing}")
