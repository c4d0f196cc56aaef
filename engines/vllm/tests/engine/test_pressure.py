from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stores import Folder
from support.vllm_engine import CHUNK_BYTES, Engine, Way, make_prompt, same

CHUNKS = 4
REQUESTS = 20
HOST_SLOTS = 12
#: Enough blocks for three prompts, but not for their answers too.
DEVICE_BLOCKS = 16
ANSWER_TOKENS = 24

# Groups of requests share a prefix, as conversations do. All requests together exceed the pool.
PROMPTS = [
    make_prompt(seed % 5, 2, extra=0) + make_prompt(100 + seed, CHUNKS - 2, extra=120)
    for seed in range(REQUESTS)
]


@pytest.fixture(scope="module")
def store(folder: Path, offloading_way: Way) -> Folder:
    return Folder(folder / f"pressure-{offloading_way.name}", CHUNK_BYTES)


@pytest.fixture(scope="module")
def engine(offloading_way: Way, start_engine: Any, store: Folder) -> Iterator[Engine]:
    offloading = offloading_way.offloading(store.url, host_bytes=HOST_SLOTS * CHUNK_BYTES)
    assert offloading is not None
    # Generated tokens are offloaded too, so a preempted request finds its chunks.
    offloading["offload_prompt_only"] = False
    with start_engine(
        offloading, num_gpu_blocks_override=DEVICE_BLOCKS, max_model_len=1024
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = plain.outputs(PROMPTS, max_tokens=ANSWER_TOKENS)
    return outputs


def test_a_tiny_host_pool(engine: Engine, store: Folder, expected: list[dict[str, Any]]) -> None:
    assert same(engine.generate(prompts=PROMPTS, max_tokens=ANSWER_TOKENS), expected)
    assert engine.preemptions() > 0
    engine.settle()
    assert not any(engine.leftovers().values()), engine.leftovers()
    before = engine.stats()[store.name]["loaded_chunks"]
    assert same(engine.generate(prompts=PROMPTS, max_tokens=ANSWER_TOKENS), expected)
    assert engine.stats()[store.name]["loaded_chunks"] > before
    engine.settle()
    assert not any(engine.leftovers().values()), engine.leftovers()
