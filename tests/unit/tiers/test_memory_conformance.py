from __future__ import annotations

import pytest

from kvtier_sdk.testing import TierConformance
from kvtier_sdk.testing.conformance.subject import TierLike


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def tier(self) -> TierLike:
        return "memory:"

    def bad_settings(self) -> dict[str, TierLike]:
        return {"capacity below one chunk": "memory:?capacity=1KiB"}

    def small_tier(self, object_bytes: int) -> TierLike:
        return {"type": "memory", "capacity": 10 * object_bytes}

    def short_lived_tier(self) -> TierLike:
        return "memory:?ttl=1s"

    def aging_tier(self) -> TierLike:
        return "memory:?ttl=1s&max_age=2s"
