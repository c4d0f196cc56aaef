import json
import urllib.request
from pathlib import Path
from typing import Any

from support.redis_server import free_port
from support.vllm_engine import BLOCK_TOKENS, CHUNK_BYTES, OUR_MANAGER, make_prompt, same

from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.engine import ask
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


def test_a_sleeping_engine_drains_its_tier(start_engine: Any, plain: Any, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    port = free_port()
    offloading = OUR_MANAGER.offloading(f"file://{tmp_path}/kv?direct_io=off", runner="process")
    offloading |= {"admin_socket": str(path), "trace_dir": str(tmp_path / "trace")}
    offloading |= {"metrics_port": port}
    prompts = [make_prompt(1, 3)]
    expected = plain.outputs(prompts)

    def serve() -> int:
        assert engine.reset_all()
        outputs = engine.generate(prompts=prompts)
        engine.settle()
        assert same(outputs, expected)
        return int(outputs[0]["cached"])

    # With an unexpected hash seed, the first request makes the manager open its tiers again.
    with start_engine(offloading, environment={"PYTHONHASHSEED": "7"}) as engine:
        assert ask(path, {"command": "status"})["tiers"][0]["is_open"]
        engine.generate(prompts=prompts)
        engine.settle()
        assert serve() == 3 * BLOCK_TOKENS
        answer = ask(path, {"command": "drain", "tier": "file"})
        assert (answer["is_drained"], answer["is_idle"]) == (True, True)
        assert serve() == 0
        status = ask(path, {"command": "status"})
        # Both misses count as absent: the first prompt's, and the miss while the tier was drained.
        misses = status["host"]["misses"]
        assert sum(misses.values()) == misses["absent"] == 2
        assert not sum(status["tiers"][0]["failures"].values())
        ask(path, {"command": "resume", "tier": "file"})
        assert serve() == 3 * BLOCK_TOKENS
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            assert b'kvtier_hit_chunks_total{tier="file"} 6.0' in page.read()
        assert not any(engine.leftovers().values()), engine.leftovers()
    assert not path.exists()
    (request, *others) = read_trace(tmp_path / "trace")
    assert len(request.keys) == 3
    assert all(other.keys == request.keys for other in others)
    assert len(others) == 3
