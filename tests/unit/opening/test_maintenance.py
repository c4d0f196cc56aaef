from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.tiers.shelf import ShelfTier

from kvtier_sdk import (
    Entry,
    Namespace,
    RunnerOptions,
    StoredNamespace,
    TierContractError,
    TierError,
    TierSpec,
    TierTimeoutError,
    TierUnavailableError,
    Usage,
    Verdict,
)
from kvtier_sdk.cli.tier.maintenance import open_for_maintenance

NAMESPACE = Namespace({"model": "llama", "chunk_bytes": 4096})


def spec_of(tier_class: type[ShelfTier]) -> TierSpec:
    config = tier_class.config_model.model_validate({"shelf": tier_class.__name__})
    return TierSpec("shelf", "shelf", tier_class, config, RunnerOptions.model_validate({}))


class Hangs(ShelfTier):
    async def scan(self) -> AsyncIterator[Entry]:
        await asyncio.Event().wait()
        yield Entry(b"", 0)

    async def lookup(self, keys: Any, request: Any) -> Any:
        await asyncio.Event().wait()


class Counts(ShelfTier):
    async def usage(self) -> Any:
        return 17

    async def scan(self) -> AsyncIterator[Entry]:
        raise TierUnavailableError("gone")
        yield


def test_a_tier_that_hangs_is_not_waited_for() -> None:
    with open_for_maintenance(spec_of(Hangs), NAMESPACE, timeout_s=0.2) as tier:
        with pytest.raises(TierTimeoutError, match=r"shelf: no answer within 0\.2 s"):
            list(tier.entries())
        with pytest.raises(TierError, match="timeout"):
            tier.lookup([b"a key"])


def test_what_a_tier_raises_has_its_name() -> None:
    with open_for_maintenance(spec_of(Counts), NAMESPACE) as tier:
        with pytest.raises(TierUnavailableError, match="shelf scan: gone"):
            list(tier.entries())
        with pytest.raises(TierContractError, match="shelf usage: returned a int where a Usage"):
            tier.usage()


def test_more_entries_than_a_page_are_all_listed() -> None:
    class Full(ShelfTier):
        async def scan(self) -> AsyncIterator[Entry]:
            for number in range(2500):
                yield Entry(number.to_bytes(8, "big"), 1)

    with open_for_maintenance(spec_of(Full), NAMESPACE) as tier:
        assert len({entry.key for entry in tier.entries()}) == 2500
        assert tier.usage() == Usage(0, 0, None)
        assert [one.fingerprint for one in tier.namespaces()] == []


def test_a_store_makes_the_namespace_and_its_end_can_be_waited_for() -> None:
    spec = spec_of(ShelfTier)
    with open_for_maintenance(spec, NAMESPACE, stores=True) as tier:
        end = tier.begin_store([b"one", b"two"], [0, 1])
        end()
    stored = StoredNamespace.read(NAMESPACE.fingerprint, NAMESPACE.manifest_json().encode())
    with open_for_maintenance(spec, stored) as tier:
        assert list(tier.namespaces()) == [stored]
        verdicts = tier.examine([b"one", b"two", b"three"])
        assert verdicts == [Verdict.OK, Verdict.OK, Verdict.NOT_FOUND]
        tier.delete([b"one"])
        assert [entry.key for entry in tier.entries()] == [b"two"]
