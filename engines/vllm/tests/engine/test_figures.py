import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.vllm_engine import BLOCK_TOKENS, CHUNK_BYTES, Engine, Way, make_prompt

CHUNKS = 3


@pytest.fixture(scope="module")
def engine(offloading_way: Way, start_engine: Any) -> Iterator[Engine]:
    offloading = offloading_way.offloading("memory:?name=shelf")
    with start_engine(offloading) as engine:
        for _ in range(2):
            engine.generate(prompts=[make_prompt(1, CHUNKS)])
            engine.settle()
            engine.reset_all()
        engine.settle()
        yield engine


def test_metrics_reach_prometheus(engine: Engine) -> None:
    metrics = engine.metrics()
    assert metrics["kvtier_stored_bytes_total,tier=shelf"] == CHUNKS * CHUNK_BYTES
    assert metrics["kvtier_loaded_chunks_total,tier=shelf"] == CHUNKS
    assert metrics["kvtier_hit_chunks_total,tier=shelf"] == CHUNKS
    saved = "kvtier_saved_tokens_total,model=.*,tier=shelf"
    (tokens,) = (value for name, value in metrics.items() if re.fullmatch(saved, name))
    assert tokens == CHUNKS * BLOCK_TOKENS
    assert metrics["kvtier_read_breaker_open,tier=shelf"] == 0
    assert metrics["kvtier_process_restarts_total,tier=shelf"] == 0
    assert metrics["kvtier_failed_chunks_total,operation=load,reason=timeout,tier=shelf"] == 0
    assert metrics["kvtier_job_chunks_sum,operation=load,tier=shelf"] == CHUNKS
    assert "kvtier_tier_used_chunks,tier=shelf" in metrics


def test_events_name_each_medium(engine: Engine) -> None:
    events = engine.events()
    stored = [event for event in events if event[0] == "BlockStored"]
    # The tier keeps its chunks in memory, so its events count as CPU events, like the pool's.
    assert {medium for _, medium, _ in stored} == {"GPU", "CPU"}
    in_memory = sum(count for _, medium, count in stored if medium == "CPU")
    assert in_memory == CHUNKS * 3
