import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import BLOCK_TOKENS, Engine, Interpreter, Way, make_model, make_prompt

CHUNKS = 8
PROMPTS = [make_prompt(seed, CHUNKS) for seed in range(20, 24)]
# In a model this wide, a chunk takes longer to compute than to load, even on a busy machine.
MODEL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    interpreter = Interpreter(tmp_path_factory.mktemp("interpreter"))
    yield interpreter
    interpreter.close()


@pytest.fixture
def busy_cores() -> Iterator[None]:
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.usefixtures("busy_cores")
def test_the_second_engines_prompts_are_whole(
    interpreter: Interpreter, offloading_way: Way, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", **MODEL)
    # Make the pool hold all prompts. In a smaller pool, a slow disk causes dropped stores.
    offloading = offloading_way.offloading(
        f"file://{tmp_path}/kv", host_bytes=256 * 2**20, patient=False
    )
    cached: list[list[int]] = []
    for turn in range(2):
        log = tmp_path / f"engine-{turn}.log"
        with Engine(interpreter, model, log, offloading) as engine:
            outputs: list[dict[str, Any]] = []
            for prompt in PROMPTS:
                outputs += engine.generate(prompts=[prompt])
            engine.settle()
            cached.append([output["cached"] for output in outputs])
    assert cached == [[0] * len(PROMPTS), [CHUNKS * BLOCK_TOKENS] * len(PROMPTS)]
