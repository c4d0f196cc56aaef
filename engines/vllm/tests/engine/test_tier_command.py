import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.vllm_engine import BLOCK_TOKENS, Way, make_prompt

CHUNKS = 3
PROMPT = make_prompt(4, CHUNKS)


def tier(command: str, *words: str) -> dict[str, Any]:
    program = "from kvtier_sdk.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "tier", command, "--json", *words],
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_finds_a_prompts_chunks(offloading_way: Way, start_engine: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    with start_engine(offloading_way.offloading(url)) as engine:
        engine.generate(prompts=[PROMPT])
        engine.settle()
        (file,) = tier("ls", url)["tiers"]
        (namespace,) = [one for one in file["namespaces"] if one["chunks"]]
        assert namespace["facts"]["model_revision"] == "made up"
        words = ["--namespace", namespace["fingerprint"], "--tokens", json.dumps(PROMPT)]
        explained = tier("explain", url, *words)
        assert explained["tiers"][0]["states"] == [["present"] * CHUNKS]
        (verified,) = (one for one in tier("verify", url)["namespaces"] if one["whole"])
        assert (verified["whole"], verified["damaged"]) == (CHUNKS, [])
        engine.reset_all()
        (output,) = engine.generate(prompts=[PROMPT])
        assert output["cached"] == CHUNKS * BLOCK_TOKENS
