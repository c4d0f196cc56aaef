"""``kvtier tier verify``: reads chunks and compares them with their headers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.cli.engine import wait
from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, read_target
from kvtier_sdk.cli.terminal import JsonOption, progress, read_flag, say
from kvtier_sdk.cli.tier.contents import sizes_as_json, sizes_in_words
from kvtier_sdk.cli.tier.maintenance import chunk_bytes_of, open_for_maintenance, pages
from kvtier_sdk.cli.tier.options import ModelOption, NamespaceOption, TimeoutOption, read_timeout
from kvtier_sdk.cli.tier.selection import Faults, Selection, named
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.units import parse_bytes
from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.types import Capability, OffloadKey

_MOST_SHOWN = 10
_AT_ONCE_BYTES = 16 * 2**20

RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="SIZE",
        show_default="no limit",
        help="At most so many bytes of stored objects a second, such as 100MiB, to leave the store "
        "to its engines.",
    ),
]


def verify_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete the chunks that are damaged.")
    ] = False,
    rate: RateOption = None,
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """Read every chunk and compare it with its header, as an engine does before it uses a chunk.

    Nothing is changed without --repair. An engine never uses a damaged chunk: it counts, deletes
    and recomputes the chunk. For example

        kvtier tier verify --rate 100MiB --repair kv.toml#cache

    The exit status is 1 if damaged chunks remain, or if a tier could not be read.
    """
    target, timeout_s = read_target(tiers), read_timeout(timeout)
    selection, pace = Selection.read(namespace, model), Pace(rate)
    faults = Faults(target)
    found: list[_Verified] = []
    for spec in target.config.tiers:
        with faults.of(spec):
            for one in selection.of(spec, timeout_s):
                verified = _Verified(spec, one)
                found.append(verified)
                with faults.of(spec):
                    _verify(verified, pace, timeout_s, repair=repair)
                if not as_json and verified.verdicts:
                    say(*verified.lines())
        if not as_json:
            faults.show(spec)
    stay = sum(len(verified.damaged) - verified.deleted for verified in found)
    if as_json:
        namespaces = [verified.as_json() for verified in found]
        ok = not stay and not faults.by_tier
        print(json.dumps({"ok": ok, "namespaces": namespaces, "faults": faults.by_tier}))
    faults.end()
    if stay:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Verified:
    spec: TierSpec
    namespace: Namespace
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    # Totals of the intact chunks: how many are compressed, bytes in the tier, bytes after a load.
    compressed: int = 0
    stored_bytes: int = 0
    plain_bytes: int = 0
    damaged: list[OffloadKey] = field(default_factory=list)
    deleted: int = 0

    def lines(self) -> Iterator[str]:
        whole = self.verdicts[Verdict.OK]
        said = [f"{whole:,} chunks whole", f"{len(self.damaged):,} damaged"]
        if self.deleted:
            said.append(f"{self.deleted:,} of them deleted")
        if gone := self.verdicts[Verdict.NOT_FOUND]:
            said.append(f"{gone:,} gone meanwhile")
        if sealed := self.verdicts[Verdict.AUTH]:
            said.append(f"{sealed:,} that cannot be opened with this tier's keys")
        if unreadable := self._unreadable:
            said.append(f"{unreadable:,} that cannot be read")
        if self.compressed:
            sizes = sizes_in_words(self.stored_bytes, self.plain_bytes)
            said.append(f"{self.compressed:,} compressed; the whole ones take {sizes}")
        where = f"tier {self.spec.name!r}, namespace {named(self.namespace)}"
        yield f"{where}: {', '.join(said)}"
        for key in self.damaged[:_MOST_SHOWN]:
            yield f"  damaged: {key.hex()}"
        if len(self.damaged) > _MOST_SHOWN:
            yield f"  and {len(self.damaged) - _MOST_SHOWN:,} more (--json lists all)"

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.spec.name,
            "fingerprint": self.namespace.fingerprint,
            "whole": self.verdicts[Verdict.OK],
            "compressed": self.compressed,
            **sizes_as_json(self.stored_bytes, self.plain_bytes),
            "gone": self.verdicts[Verdict.NOT_FOUND],
            "not_opened": self.verdicts[Verdict.AUTH],
            "unreadable": self._unreadable,
            "damaged": [key.hex() for key in self.damaged],
            "deleted": self.deleted,
        }

    @property
    def _unreadable(self) -> int:
        return self.verdicts[Verdict.FAILED] + self.verdicts[Verdict.CAPACITY]


def _verify(verified: _Verified, pace: Pace, timeout_s: float, *, repair: bool) -> None:
    namespace = verified.namespace
    with open_for_maintenance(verified.spec, namespace, timeout_s=timeout_s) as tier:
        if repair:
            tier.need(Capability.DELETE, "delete chunks")
        sizes = {entry.key: entry.object_bytes for entry in tier.entries()}
        keys = list(sizes)
        chunk_bytes = check_readable(verified.spec, namespace) if keys else 1
        at_once = max(1, pace.part_bytes(_AT_ONCE_BYTES) // chunk_bytes)
        with progress(f"verify {named(namespace)}", len(keys)) as step:
            for part in pages(keys, at_once):
                verdicts = tier.examine(part)
                verified.verdicts.update(verdicts)
                verified.compressed = tier.compressed_chunks
                verified.stored_bytes = tier.client.stats.loaded_object_bytes
                verified.plain_bytes = tier.client.stats.loaded_bytes
                found = zip(part, verdicts, strict=True)
                damaged = [key for key, verdict in found if verdict is Verdict.CORRUPT]
                verified.damaged += damaged
                if repair and damaged:
                    tier.delete(damaged)
                    verified.deleted += len(damaged)
                step(len(part))
                pace.wait(sum(sizes[key] for key in part))


class Pace:
    def __init__(self, rate: str | None, clock: Clock | None = None) -> None:
        self._rate_bytes = None if rate is None else read_flag("--rate", parse_bytes, rate)
        self._clock = clock or SystemClock()
        self._due_s = self._clock.now_s()

    def part_bytes(self, most_bytes: int) -> int:
        """Return how many bytes may be moved in a second, limited to ``most_bytes``."""
        return most_bytes if self._rate_bytes is None else min(most_bytes, self._rate_bytes)

    def wait(self, size_bytes: int) -> None:
        """Count ``size_bytes`` as moved, and wait as long as the rate requires."""
        if self._rate_bytes is None:
            return
        now_s = self._clock.now_s()
        self._due_s = max(self._due_s, now_s - 1.0) + size_bytes / self._rate_bytes
        wait(max(0.0, self._due_s - now_s))


def check_readable(spec: TierSpec, namespace: Namespace) -> int:
    """Return the chunks' length; raise :class:`ConfigError` if a tier cannot read the chunks."""
    chunk_bytes = chunk_bytes_of(namespace)
    if chunk_bytes is None:
        raise ConfigError(
            f"namespace {named(namespace)}: its manifest does not say how long a chunk is; give "
            "its facts with --namespace FACTS.json"
        )
    codec = namespace.facts.get("codec")
    if codec is not None and spec.runner.codec is None:
        raise ConfigError(
            f"namespace {named(namespace)} is sealed: give tier {spec.name!r} its option 'codec', "
            f"'{codec}:...'"
        )
    return chunk_bytes
