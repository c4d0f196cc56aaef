from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import EngineError, Way, make_prompt


def test_a_misspelt_option_of_a_tier(offloading_way: Way, start_engine: Any, folder: Path) -> None:
    with pytest.raises(EngineError) as error:
        start_engine(offloading_way.offloading(f"file://{folder}", capasity="1GiB"))
    assert str(error.value).startswith(
        "ConfigError: kv_transfer_config: kv_connector_extra_config: unknown option "
        "'secondary_tiers[0].capasity'; did you mean 'capacity'?"
    )
    assert "Resolved architecture" in error.value.log
    assert "Starting to load model" not in error.value.log


def test_the_start_is_in_vllms_log(offloading_way: Way, start_engine: Any, folder: Path) -> None:
    with start_engine(offloading_way.offloading(f"file://{folder}/kv", name="disk")) as engine:
        engine.generate(prompts=[make_prompt(1, chunks=1)])
        lines = [line for line in engine.log().splitlines() if "start_log.py" in line]
    assert all(" INFO " in line for line in lines)
    for text in (
        "kvtier ",
        "host pool: 64 MiB",
        f"tier disk (file): file://{folder}/kv",
        "namespace",
    ):
        assert any(text in line for line in lines), lines
    assert "Starting to load model" in engine.log()
