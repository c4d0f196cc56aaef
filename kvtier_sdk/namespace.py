"""Namespaces: the facts that must match before an engine can reuse stored bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from kvtier_sdk.chunk_header import HEADER_VERSION
from kvtier_sdk.options.secrets import masked

_FINGERPRINT_HEX = 32
_FINGERPRINT = re.compile(rf"[0-9a-f]{{{_FINGERPRINT_HEX}}}")
#: Limits a manifest's nesting, because ``_is_flat`` is recursive.
_MOST_LEVELS = 32


@dataclass(frozen=True, eq=False)
class Namespace:
    """The facts that decide whether a chunk's bytes can be reused. A fingerprint identifies them.

    >>> ours = Namespace({"model": "llama", "dtype": "bfloat16"})
    >>> theirs = Namespace({"model": "llama", "dtype": "float16"})
    >>> ours == theirs
    False
    >>> ours.differences(theirs.manifest)
    {'dtype': ('bfloat16', 'float16')}

    Attributes:
        facts: JSON values by name: engine, model and revision, dtype, KV layout, parallelism,
            tokens per block and per chunk, groups, hash algorithm and seed.
    """

    facts: Mapping[str, object]

    @cached_property
    def manifest(self) -> dict[str, object]:
        """The facts and the header's format version, which a tier stores for operators.

        Recognised secrets appear as ``"***"``, but the fingerprint covers their real values.
        """
        shown: dict[str, object] = masked("", self._all_facts)
        return shown

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: SHA-256 of the facts as canonical JSON, cut to 128 bits."""
        return _fingerprint_of(self._all_facts)

    @property
    def tokens_per_chunk(self) -> list[int]:
        """The number of tokens in a chunk, for each KV-cache group; empty if unknown."""
        facts: Mapping[str, Any] = self.facts
        with suppress(LookupError, TypeError):
            groups, blocks = facts["groups"], facts["blocks_per_chunk"]
            return [group["tokens_per_block"] * blocks for group in groups]
        tokens = facts.get("tokens_per_chunk")
        return [tokens] if type(tokens) is int and tokens > 0 else []

    @property
    def _all_facts(self) -> Mapping[str, object]:
        return {**self.facts, "frame_version": HEADER_VERSION}

    def for_chunks(self, chunk_bytes: int) -> Namespace:
        """Return a namespace with one more fact: ``chunk_bytes``, the length of a chunk."""
        return self.adding(chunk_bytes=chunk_bytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Namespace):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def adding(self, **facts: object) -> Namespace:
        """Return a namespace with additional ``facts``."""
        return Namespace({**self.facts, **facts})

    def manifest_json(self) -> str:
        """Return the text of a ``manifest.json``: the fingerprint and the facts, one per line."""
        document = {"fingerprint": self.fingerprint, "facts": self.manifest}
        return json.dumps(document, indent=2, sort_keys=True) + "\n"

    def differences(self, facts: Mapping[str, object]) -> dict[str, tuple[object, object]]:
        """Compare with a manifest's ``facts``; map each differing name to both values, ours first.

        A missing value is ``None``. The values of secrets are not compared.
        """
        ours = json.loads(json.dumps(self.manifest))
        return {
            name: (ours.get(name), facts.get(name))
            for name in sorted(ours.keys() | facts.keys())
            if (name in ours) != (name in facts)
            or _canonical(ours.get(name)) != _canonical(facts.get(name))
        }


@dataclass(frozen=True, eq=False)
class StoredNamespace(Namespace):
    """A namespace found in a tier: its chunks' fingerprint, and the facts of its manifest.

    Anyone who can write to a store can plant a manifest, so facts are accepted only if they match
    the fingerprint. A manifest with a masked secret is therefore never accepted.

    >>> ours = Namespace({"model": "llama"})
    >>> found = StoredNamespace.read(ours.fingerprint, ours.manifest_json().encode())
    >>> found == ours, found.facts["model"]
    (True, 'llama')

    Attributes:
        stored_under: the fingerprint under which the chunks are stored. :meth:`for_chunks`
            and :meth:`adding` do not change it.
        fault: the reason why ``facts`` is empty: ``"no manifest"``, ``"unreadable manifest"`` or
            ``"unverified manifest"``; empty if the facts are verified.
        MOST_BYTES: the maximum number of bytes that a tier reads of a manifest.
    """

    MOST_BYTES: ClassVar[int] = 1 << 20

    stored_under: str
    fault: str = ""

    @classmethod
    def read(cls, fingerprint: str, manifest: bytes | None = None) -> Self:
        """Return the namespace under ``fingerprint``, with the facts of its ``manifest``."""
        if manifest is None:
            return cls({}, fingerprint, "no manifest")
        facts: object = None
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            facts = json.loads(manifest)["facts"]
        if not isinstance(facts, dict) or not _is_flat(facts, _MOST_LEVELS):
            return cls({}, fingerprint, "unreadable manifest")
        if _fingerprint_of(facts) != fingerprint:
            return cls({}, fingerprint, "unverified manifest")
        return cls(facts, fingerprint)

    @staticmethod
    def is_fingerprint(text: str) -> bool:
        """Return true if the string ``text`` has the form of a fingerprint."""
        return _FINGERPRINT.fullmatch(text) is not None

    @cached_property
    def fingerprint(self) -> str:
        return self.stored_under

    @property
    def _all_facts(self) -> Mapping[str, object]:
        return self.facts

    def adding(self, **facts: object) -> Namespace:
        return self


def _fingerprint_of(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(_canonical(facts).encode()).hexdigest()[:_FINGERPRINT_HEX]


def _is_flat(value: object, most_levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return most_levels > 0 and all(_is_flat(inner, most_levels - 1) for inner in value)


def _canonical(value: object) -> str:
    # Compare values as JSON, which tells 1, 1.0 and True apart. In Python they are equal.
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
