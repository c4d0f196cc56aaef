import json
from pathlib import Path
from typing import Any

from support.vllm_engine import BLOCK_TOKENS, CHUNK_BYTES, OUR_MANAGER, make_prompt

from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import read_trace, replay

SLOTS = 12


def conversations() -> list[list[int]]:
    texts = [make_prompt(seed, 6, extra=0) for seed in range(4)]
    return [
        texts[talk][: chunks * BLOCK_TOKENS + 5]
        for chunks in (1, 2, 3, 2, 5)
        for talk in (0, 1, 0, 2, 3, 0)
    ]


def test_a_replay_of_the_trace_hits_what_the_engine_hit(start_engine: Any, tmp_path: Path) -> None:
    offloading = OUR_MANAGER.offloading(
        "memory:?capacity=20MiB", host_bytes=SLOTS * CHUNK_BYTES, admission="off"
    )
    offloading |= {"trace_dir": str(tmp_path / "trace")}
    prompts = conversations()
    cached = 0
    with start_engine(offloading) as engine:
        for number, prompt in enumerate(prompts):
            if number % 3:
                engine.reset_device()
            (output,) = engine.generate(prompts=[prompt])
            engine.settle()
            cached += output["cached"]
    (file,) = (tmp_path / "trace").iterdir()
    for line in map(json.loads, file.read_text().splitlines()):
        assert line["input_length"] == len(line["hash_ids"]) * BLOCK_TOKENS
    requests = read_trace(tmp_path / "trace")
    assert [len(request.keys) for request in requests] == [
        len(prompt) // BLOCK_TOKENS for prompt in prompts
    ]
    tier = "memory:?capacity=20MiB&admission=off"
    report = replay(
        requests,
        TieringConfig.from_dict({"slots": SLOTS, "chunk_bytes": CHUNK_BYTES, "tiers": [tier]}),
    )
    assert report.hit_chunks == cached // BLOCK_TOKENS
    assert 0 < report.hit_chunks < report.chunks
