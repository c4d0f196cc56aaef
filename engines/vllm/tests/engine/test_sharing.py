from collections.abc import Iterator
from typing import Any

import pytest
from support.vllm_engine import Engine, Way, make_prompt, same

CHUNKS = 4
PREFIX = make_prompt(1, CHUNKS, extra=0)
PAIR = [PREFIX + make_prompt(seed, 0, extra=20) for seed in (2, 3)]

#: A load from this tier lasts for several steps of the engine.
SLOW_TIER = "memory:?latency=200ms"


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "no-caching"])
def engine(
    request: pytest.FixtureRequest, offloading_way: Way, start_engine: Any
) -> Iterator[Engine]:
    offloading = offloading_way.offloading(SLOW_TIER)
    with start_engine(offloading, enable_prefix_caching=request.param) as engine:
        engine.generate(prompts=[[*PREFIX, 5]])
        engine.settle()
        yield engine


@pytest.fixture
def cold(engine: Engine) -> Engine:
    engine.reset_all()
    assert (engine.device_blocks(), engine.primary_chunks()) == (0, 0)
    return engine


def loaded_chunks(engine: Engine) -> int:
    count: int = engine.stats()["memory"]["loaded_chunks"]
    return count


@pytest.mark.parametrize("abort", [0, 1], ids=["first", "second"])
def test_one_of_two_requests_is_aborted_while_loading(cold: Engine, plain: Any, abort: int) -> None:
    before = loaded_chunks(cold)
    cold.add(prompts=PAIR)
    assert cold.step_until_loading()
    cold.abort(index=abort)
    assert same(cold.finish(), [plain.outputs(PAIR)[1 - abort]])
    assert loaded_chunks(cold) - before == CHUNKS
    cold.settle()
    assert not any(cold.leftovers().values()), cold.leftovers()
