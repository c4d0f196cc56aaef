"""A wrong option stops the engine at its start, with a sentence that says what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import EngineError, Way


def test_a_misspelt_option_of_a_tier(offloading_way: Way, start_engine: Any, folder: Path) -> None:
    with pytest.raises(EngineError) as error:
        start_engine(offloading_way.offloading(f"file://{folder}", capasity="1GiB"))
    assert str(error.value).startswith(
        "ConfigError: kv_connector_extra_config: unknown option 'secondary_tiers[0].capasity'; "
        "did you mean 'capacity'?"
    )
