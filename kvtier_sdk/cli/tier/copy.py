"""``kvtier tier copy``: copies chunks from one tier to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvtier_sdk.cli.targets import TARGET_HELP, read_target
from kvtier_sdk.cli.terminal import JsonOption, progress, say
from kvtier_sdk.cli.tier.contents import Contents
from kvtier_sdk.cli.tier.maintenance import MaintainedTier, open_for_maintenance, pages
from kvtier_sdk.cli.tier.options import ModelOption, NamespaceOption, TimeoutOption, read_timeout
from kvtier_sdk.cli.tier.selection import Selection, named
from kvtier_sdk.cli.tier.verify import Pace, RateOption, check_readable
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.types import OffloadKey

#: Size of the pool. SRC fills one half while the other half is written to DST.
_POOL_BYTES = 32 * 2**20
#: The SDK's facts that DST sets anew, because they depend on the tier or the release. The fact
#: ``compress`` is copied, so that only engines that accept rounded chunks find the copies.
_ADDED = ("frame_version", "codec")


def copy_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help=TARGET_HELP)],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Likewise.")],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    rate: RateOption = None,
    read_back: Annotated[
        bool,
        typer.Option("--read-back", help="Read each copy again from DST, and check it there too."),
    ] = False,
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """Copy chunks from one tier to another, so that engines of DST find them.

    Each chunk is checked against its header on the way, and damaged chunks are omitted. Chunks that
    DST already has are not copied again, so the same command resumes an interrupted copy. SRC is
    not changed. DST evicts chunks beyond its capacity; the command reports how many. For example

        kvtier tier copy file:///data/kv redis://cache:6379/0 --rate 100MiB

    The exit status is 1 if chunks were left out or did not stay, or if a tier failed.
    """
    src, dst = read_target(source).only_tier, read_target(destination).only_tier
    timeout_s, selection, pace = read_timeout(timeout), Selection.read(namespace, model), Pace(rate)
    found = []
    for one in selection.of(src, timeout_s):
        copied = _Copied(one.fingerprint, named(one))
        if not Contents.of(src, one, timeout_s).chunks:
            continue
        found.append(copied)
        try:
            chunk_bytes = check_readable(src, one)
            theirs = _at_destination(src, one)
        except ConfigError as error:
            copied.fault = str(error)
        else:
            half = max(1, pace.part_bytes(_POOL_BYTES // 2) // chunk_bytes)
            with (
                closing(HostPool(2 * half, chunk_bytes)) as pool,
                open_for_maintenance(src, one, timeout_s=timeout_s, pool=pool) as old,
                open_for_maintenance(
                    dst, theirs, timeout_s=timeout_s, pool=pool, stores=True
                ) as new,
            ):
                stayed = _copy(old, new, half, copied, pace)
                if read_back:
                    _read_back(new, stayed, copied)
        if not as_json:
            say(copied.line(read_back=read_back))
    is_short = any(map(_Copied.is_short, found))
    if as_json:
        namespaces = [asdict(copied) for copied in found]
        print(json.dumps({"ok": not is_short, "namespaces": namespaces}))
    elif not found:
        say("nothing to copy: no namespace with chunks matches")
    if is_short:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Copied:
    """The result for one namespace. ``--json`` prints these fields."""

    fingerprint: str
    name: str
    copied: int = 0
    copied_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    there: int = 0
    gone: int = 0
    damaged: int = 0
    evicted: int = 0
    missing: int = 0
    fault: str = ""

    def is_short(self) -> bool:
        """Return true if some of SRC's chunks are missing in DST."""
        return bool(self.damaged or self.evicted or self.missing or self.fault)

    def line(self, *, read_back: bool) -> str:
        if self.fault:
            return f"FAILED: {self.fault}"
        said = [
            f"{self.copied:,} chunks copied ({format_bytes(self.copied_bytes)}, "
            f"{format_bytes(self.read_bytes)} read, {format_bytes(self.written_bytes)} written)"
        ]
        if read_back and not self.missing:
            said[0] += ", read back and whole"
        counts = {
            "were there": self.there,
            "gone meanwhile": self.gone,
            "damaged and left out": self.damaged,
            "evicted by DST meanwhile: its capacity is too small": self.evicted,
            "not whole when they were read back": self.missing,
        }
        said += [f"{chunks:,} {what}" for what, chunks in counts.items() if chunks]
        return f"namespace {self.name}: {'; '.join(said)}"


def _present(tier: MaintainedTier, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    verdicts = tier.lookup(keys)
    return [key for key, verdict in zip(keys, verdicts, strict=True) if verdict is Verdict.OK]


def _at_destination(src: TierSpec, namespace: Namespace) -> Namespace:
    """Return the namespace without the SDK's facts, because DST adds its own."""
    engines = Namespace({name: of for name, of in namespace.facts.items() if name not in _ADDED})
    codec = src.runner.codec_name if "codec" in namespace.facts else None
    if (engines if codec is None else engines.adding(codec=codec)) != namespace:
        raise ConfigError(
            f"namespace {named(namespace)}: its manifest does not tell all facts, since secrets "
            "are hidden in it, or it is of another release; give them with --namespace FACTS.json"
        )
    return engines


def _copy(
    src: MaintainedTier, dst: MaintainedTier, half: int, copied: _Copied, pace: Pace
) -> list[OffloadKey]:
    """Load one half of the pool while storing the other; return the chunks that DST kept."""
    sizes = {entry.key: entry.object_bytes for entry in src.entries()}
    paced_bytes = read_bytes = 0
    stored: list[OffloadKey] = []
    there: list[OffloadKey] = []
    end_store: Callable[[], object] | None = None
    with progress(f"copy {copied.name}", len(sizes)) as step:
        for number, part in enumerate(pages(list(sizes), half)):
            present = dict.fromkeys(_present(dst, part))
            missing = [key for key in part if key not in present]
            loaded = _load(src, missing, half * (number % 2), copied)
            if end_store is not None:
                end_store()
            end_store = dst.begin_store(list(loaded), list(loaded.values())) if loaded else None
            there += present
            stored += loaded
            step(len(part))
            read_bytes += sum(sizes[key] for key in missing)
            # Use the larger total, because the rate limits each tier, and lengths can differ.
            moved_bytes = max(read_bytes, dst.client.stats.stored_object_bytes)
            pace.wait(moved_bytes - paced_bytes)
            paced_bytes = moved_bytes
        if end_store is not None:
            end_store()
    # Look up all stored chunks, because DST may have evicted some of them.
    stayed = _present(dst, stored)
    copied.there = len(_present(dst, there))
    copied.copied = len(stayed)
    copied.copied_bytes = len(stayed) * src.client.chunk_bytes
    copied.read_bytes = src.client.stats.loaded_object_bytes
    copied.written_bytes = dst.client.stats.stored_object_bytes
    copied.evicted = len(stored) + len(there) - copied.copied - copied.there
    return stayed


def _load(
    src: MaintainedTier, keys: list[OffloadKey], first: int, copied: _Copied
) -> dict[OffloadKey, int]:
    """Load chunks into the slots from ``first`` on; return the intact chunks' slots."""
    if not keys:
        return {}
    slots = range(first, first + len(keys))
    loaded = {}
    for key, slot, verdict in zip(keys, slots, src.load(keys, slots), strict=True):
        if verdict is Verdict.OK:
            loaded[key] = slot
        elif verdict is Verdict.NOT_FOUND:
            copied.gone += 1
        else:
            copied.damaged += 1
    return loaded


def _read_back(dst: MaintainedTier, keys: list[OffloadKey], copied: _Copied) -> None:
    with progress("read back", len(keys)) as step:
        for part in pages(keys, dst.examined_at_once):
            verdicts = dst.examine(part)
            copied.missing += sum(verdict is not Verdict.OK for verdict in verdicts)
            step(len(part))
