"""``kvtier tier copy``: copies chunks from one tier to another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvtier_sdk.cli.targets import TARGET_HELP, read_target
from kvtier_sdk.cli.tier.contents import need
from kvtier_sdk.cli.tier.pace import Pace, RateOption
from kvtier_sdk.cli.tier.selection import (
    JsonOption,
    ModelOption,
    NamespaceOption,
    Selection,
    TimeoutOption,
    in_tier,
    named,
    read_timeout,
)
from kvtier_sdk.cli.tier.verify import check_readable
from kvtier_sdk.cli.tier.view import Step, progress
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.tiering.maintenance import MaintainedTier, open_for_maintenance
from kvtier_sdk.types import Capability, OffloadKey

#: Payload that is on its way: half of it is read while the other half is written.
_POOL_BYTES = 32 * 2**20
#: Facts that the SDK adds, and that differ between two tiers or releases.
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

    Each chunk is checked against its header on the way; a damaged one is left out. What DST has
    already is not copied again, so after an interruption the same command goes on. SRC is not
    changed; DST keeps to its capacity. For example

        kvtier tier copy file:///data/kv redis://cache:6379/0 --rate 100MiB

    The exit status is 1 if chunks were left out, or if a tier failed.
    """
    src, dst = read_target(source).only_tier, read_target(destination).only_tier
    timeout_s, selection, pace = read_timeout(timeout), Selection.read(namespace, model), Pace(rate)
    found = []
    for one in selection.of(src, timeout_s):
        copied = _Copied(one.fingerprint, named(one))
        found.append(copied)
        _copy(src, dst, one, copied, pace, timeout_s, read_back=read_back)
        if not as_json:
            print(copied.line(read_back=read_back), flush=True)
    is_short = any(map(_Copied.is_short, found))
    if as_json:
        namespaces = [asdict(copied) for copied in found]
        print(json.dumps({"ok": not is_short, "namespaces": namespaces}))
    elif not found:
        print("no namespace is meant")
    if is_short:
        raise typer.Exit(1)


@dataclass(slots=True)
class _Copied:
    """The outcome for the chunks of one namespace.

    Attributes:
        fingerprint: in SRC.
        name: of the namespace, for people.
        copied: chunks that were stored in DST.
        copied_bytes: their payload.
        there: chunks that DST had.
        gone: chunks that left SRC meanwhile.
        damaged: chunks that no engine could use, damaged or sealed with another key.
        evicted: chunks that DST evicted meanwhile.
        missing: copies that could not be read back.
    """

    fingerprint: str
    name: str
    copied: int = 0
    copied_bytes: int = 0
    there: int = 0
    gone: int = 0
    damaged: int = 0
    evicted: int = 0
    missing: int = 0

    def is_short(self) -> bool:
        """True if DST lacks what SRC has."""
        return bool(self.damaged or self.evicted or self.missing)

    def line(self, *, read_back: bool) -> str:
        said = [f"{self.copied:,} chunks copied ({format_bytes(self.copied_bytes)})"]
        if read_back and not self.missing:
            said[0] += ", read back and whole"
        for count, what in (
            (self.there, "were there"),
            (self.gone, "gone meanwhile"),
            (self.damaged, "damaged and left out"),
            (self.evicted, "evicted by DST meanwhile: its capacity is too small"),
            (self.missing, "not whole when they were read back"),
        ):
            if count:
                said.append(f"{count:,} {what}")
        return f"namespace {self.name}: {'; '.join(said)}"


def _copy(
    src_spec: TierSpec,
    dst_spec: TierSpec,
    namespace: Namespace,
    copied: _Copied,
    pace: Pace,
    timeout_s: float,
    *,
    read_back: bool,
) -> None:
    chunk_bytes = check_readable(src_spec, namespace)
    pool = HostPool(2 * max(1, pace.part_bytes(_POOL_BYTES // 2) // chunk_bytes), chunk_bytes)
    try:
        with (
            open_for_maintenance(src_spec, namespace, timeout_s=timeout_s, pool=pool) as src,
            open_for_maintenance(
                dst_spec,
                _at_destination(src_spec, namespace),
                timeout_s=timeout_s,
                pool=pool,
                stores=True,
            ) as dst,
        ):
            need(src, Capability.SCAN, "list its chunks")
            keys = [entry.key for entry in src.entries()]
            with progress(f"copy {named(namespace)}", len(keys)) as step:
                stored = _Transfer(src, dst, pool, copied, pace).run(keys, step)
            if read_back:
                _read_back(dst, stored, copied)
            copied.evicted = dst.evicted_chunks
    finally:
        pool.close()


def _at_destination(src: TierSpec, namespace: Namespace) -> Namespace:
    """The namespace that engines of DST have, to which its tier adds what is its own.

    Raises:
        ConfigError: the manifest does not give the namespace again.
    """
    engines = Namespace({name: of for name, of in namespace.facts.items() if name not in _ADDED})
    if (in_tier(src, engines) if "codec" in namespace.facts else engines) != namespace:
        raise ConfigError(
            f"namespace {named(namespace)}: its manifest does not tell all facts, since secrets "
            "are hidden in it, or it is of another release; give them with --namespace FACTS.json"
        )
    return engines


class _Transfer:
    """Moves chunks through the two halves of a pool: one is read into, one is written from."""

    def __init__(
        self,
        src: MaintainedTier,
        dst: MaintainedTier,
        pool: HostPool,
        copied: _Copied,
        pace: Pace,
    ) -> None:
        self._src = src
        self._dst = dst
        self._chunk_bytes = pool.chunk_bytes
        self._half = pool.slots // 2
        self._copied = copied
        self._pace = pace

    def run(self, keys: list[OffloadKey], step: Step) -> list[OffloadKey]:
        """Copy what is missing; return that."""
        stored: list[OffloadKey] = []
        end_store = None
        for number, start in enumerate(range(0, len(keys), self._half)):
            part = keys[start : start + self._half]
            missing = self._missing(part)
            first = self._half * (number % 2)
            loaded = self._load(missing, first)
            if end_store is not None:
                end_store()
            end_store = self._store(loaded, stored) if loaded else None
            step(len(part))
            self._pace.wait(len(missing) * self._chunk_bytes)
        if end_store is not None:
            end_store()
        return stored

    def _missing(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        verdicts = self._dst.lookup(keys)
        missing = [
            key for key, verdict in zip(keys, verdicts, strict=True) if verdict is not Verdict.OK
        ]
        self._copied.there += len(keys) - len(missing)
        return missing

    def _load(self, keys: list[OffloadKey], first: int) -> dict[OffloadKey, int]:
        """Load chunks into slots from the first on; return the slots of those that are whole."""
        if not keys:
            return {}
        slots = range(first, first + len(keys))
        loaded = {}
        for key, slot, verdict in zip(keys, slots, self._src.load(keys, slots), strict=True):
            if verdict is Verdict.OK:
                loaded[key] = slot
            elif verdict is Verdict.NOT_FOUND:
                self._copied.gone += 1
            else:
                self._copied.damaged += 1
        return loaded

    def _store(self, loaded: dict[OffloadKey, int], stored: list[OffloadKey]) -> Callable[[], None]:
        keys = list(loaded)
        end = self._dst.begin_store(keys, list(loaded.values()))

        def finish() -> None:
            end()
            stored.extend(keys)
            self._copied.copied += len(keys)
            self._copied.copied_bytes += len(keys) * self._chunk_bytes

        return finish


def _read_back(dst: MaintainedTier, keys: list[OffloadKey], copied: _Copied) -> None:
    at_once = dst.examined_at_once
    with progress("read back", len(keys)) as step:
        for start in range(0, len(keys), at_once):
            part = keys[start : start + at_once]
            verdicts = dst.examine(part)
            copied.missing += sum(verdict is not Verdict.OK for verdict in verdicts)
            step(len(part))
