"""A wrong option stops the engine at its start, with a sentence that says what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import EngineError, Tier, Way


def test_a_misspelt_option_of_a_tier(offloading_way: Way, start_engine: Any, folder: Path) -> None:
    tier = Tier.file(folder)
    with pytest.raises(EngineError) as error:
        start_engine(offloading_way.offloading(tier.url, capasity="1GiB"))
    assert "unknown option 'capasity'; did you mean 'capacity'?" in str(error.value)
    assert "secondary_tiers[0]" in str(error.value)
