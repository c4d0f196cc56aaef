from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.peer import settle

from kvtier_sdk import (
    ChunkTierManager,
    OffloadKey,
    RequestContext,
    TierConfig,
    TierContext,
    TierContractError,
    TierUnavailableError,
    Transfer,
)

REQUEST = RequestContext("r")
ContextFactory = Callable[..., TierContext]


def transfers(*keys: OffloadKey) -> list[Transfer]:
    return [
        Transfer(key, REQUEST, memoryview(bytearray(64)), memoryview(bytearray(256)))
        for key in keys
    ]


class Recorder(ChunkTierManager):
    """A tier whose calls wait for the chunk's gate, and raise the chunk's error if it has one."""

    contract_version = 1
    fan_out = 3

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.outcomes: dict[OffloadKey, BaseException] = {}
        self.gates: dict[OffloadKey, asyncio.Event] = {}
        self.started: list[OffloadKey] = []
        self.ended: list[OffloadKey] = []

    def hold(self, *keys: OffloadKey) -> None:
        for key in keys:
            self.gates[key] = asyncio.Event()

    @property
    def running(self) -> set[OffloadKey]:
        return set(self.started) - set(self.ended)

    async def _work(self, key: OffloadKey) -> None:
        self.started.append(key)
        try:
            if key in self.gates:
                await self.gates[key].wait()
            if key in self.outcomes:
                raise self.outcomes[key]
        finally:
            await asyncio.sleep(0)
            self.ended.append(key)

    async def contains_chunk(self, key: OffloadKey) -> bool:
        await self._work(key)
        return key.isupper()

    async def store_chunk(self, transfer: Transfer) -> None:
        await self._work(transfer.key)

    async def load_chunk(self, transfer: Transfer) -> None:
        await self._work(transfer.key)


@pytest.fixture
def tier(make_context: ContextFactory) -> Recorder:
    return Recorder(TierConfig(), make_context())


async def test_an_outage_is_never_a_no(tier: Recorder) -> None:
    tier.outcomes[b"b"] = TierUnavailableError("gone")
    with pytest.raises(TierUnavailableError):
        await tier.lookup([b"a", b"b", b"c"], REQUEST)


@pytest.mark.parametrize("fan_out", [Recorder.fan_out, 5])
async def test_no_more_chunks_than_the_fan_out_are_under_way(tier: Recorder, fan_out: int) -> None:
    tier.fan_out = fan_out
    keys = [bytes([number]) for number in range(8)]
    tier.hold(*keys)
    task = asyncio.create_task(tier.load(transfers(*keys)))
    for number, key in enumerate(keys):
        await settle()
        assert tier.running == set(keys[number : number + fan_out])
        tier.gates[key].set()
    await task


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_a_verdict_does_not_hold_on_to_the_buffers(tier: Recorder, operation: str) -> None:
    try:
        raise TierUnavailableError("lost") from OSError()
    except TierUnavailableError as error:
        tier.outcomes[b"a"] = error
    (verdict,) = await getattr(tier, operation)(transfers(b"a"))
    assert verdict is tier.outcomes[b"a"]
    assert (verdict.__traceback__, verdict.__cause__, verdict.__context__) == (None, None, None)


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_an_error_of_another_kind_ends_the_batch(tier: Recorder, operation: str) -> None:
    tier.hold(b"a")
    tier.outcomes[b"b"] = KeyError("a bug")
    with pytest.raises(KeyError, match="a bug"):
        await getattr(tier, operation)(transfers(b"a", b"b"))
    assert tier.running == set()


@pytest.mark.parametrize("capability", ["delete", "touch", "scan", "usage"])
async def test_a_capability_that_is_announced_but_missing_is_a_breach(
    tier: Recorder, capability: str
) -> None:
    arguments = [[b"key"]] if capability in ("delete", "touch") else []
    expected = f"capability {capability.upper()} is declared but {capability}\\(\\) is not"
    with pytest.raises(TierContractError, match=expected):
        await getattr(tier, capability)(*arguments)
