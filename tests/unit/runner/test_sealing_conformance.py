"""The kit's rules hold for a tier whose chunks are sealed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.keys import OURS, write_keys
from support.tiers.sealed import SealedTier, SealedTierConfig

from kvtier_sdk import RunnerOptions, TierSpec
from kvtier_sdk.testing import TierConformance
from kvtier_sdk.testing.conformance.subject import TierLike


class TestSealedTier(TierConformance):
    @pytest.fixture(params=[0, 0.002], ids=["at once", "slow"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> TierLike:
        cipher = write_keys(tmp_path / "chunk.keys", OURS)
        config = SealedTierConfig.model_validate({"cipher": cipher, "latency": request.param})
        return TierSpec("sealed", "sealed", SealedTier, config, RunnerOptions())
