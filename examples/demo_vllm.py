"""Run two vLLM engines, one after the other, with the same file tier.

    make demo-vllm

The first engine serves a few conversations of several turns and is stopped. The second engine is a
new process. It loads the first engine's chunks from the file tier instead of computing them again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONVERSATIONS, TURNS = 3, 4
QUESTION_TOKENS, ANSWER_TOKENS = 400, 16

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def serve(model: Path, chunks: Path) -> None:
    """Serve the conversations in this process; print one JSON object per turn."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "KVTierOffloadingSpec",
                "spec_module_path": "kvtier_vllm",
                "cpu_bytes_to_use": "512MiB",
                # The weights are generated, so kvtier cannot identify the model by its files.
                "model_revision": "made up",
                # A lookup past its deadline is a miss. The default is too short for a busy machine.
                "secondary_tiers": [{"type": "file", "root": str(chunks), "lookup_deadline": "1s"}],
            },
        ),
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )

    def answer(prompt: list[int]) -> Any:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return output

    # Run a first step now, because its preparations would distort the measurement.
    answer([1, 2, 3])
    for conversation in range(CONVERSATIONS):
        rng = random.Random(conversation)
        prompt: list[int] = []
        for turn in range(TURNS):
            prompt += [rng.randrange(10, 1000) for _ in range(QUESTION_TOKENS)]
            output = answer(prompt)
            document = {
                "conversation": conversation + 1,
                "turn": turn + 1,
                "prompt": len(prompt),
                "cached": output.num_cached_tokens,
                "first_token_s": output.metrics.first_token_latency,
                "answer": list(output.outputs[0].token_ids),
            }
            print(json.dumps(document), flush=True)
            prompt += document["answer"]
    # Run one more step, because an engine carries out a step's stores only in the next step.
    answer([1, 2, 3])
    llm.llm_engine.engine_core.shutdown()


def run_engine(model: Path, chunks: Path) -> list[dict[str, Any]]:
    """Serve the conversations in a new process, and return one JSON object per turn."""
    log = chunks.with_suffix(".log")
    with log.open("w") as errors:
        engine = subprocess.run(
            [sys.executable, __file__, str(model), str(chunks)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
    if engine.returncode:
        raise SystemExit(f"the engine failed:\n{log.read_text()[-4000:]}")
    return [json.loads(line) for line in engine.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        model, chunks = Path(folder, "model"), Path(folder, "kv")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        print("starting the first engine ...", flush=True)
        first = run_engine(model, chunks)
        print("it was stopped; starting the second ...\n", flush=True)
        second = run_engine(model, chunks)
    print("                                  first process            second process")
    print("conversation  turn  prompt   cached  first token    cached  first token  answer")
    for a, b in zip(first, second, strict=True):
        same = "same" if a["answer"] == b["answer"] else "DIFFERS"
        print(
            f"{a['conversation']:>12}  {a['turn']:>4}  {a['prompt']:>6}  "
            f"{a['cached']:>7}  {1e3 * a['first_token_s']:>8.0f} ms  "
            f"{b['cached']:>8}  {1e3 * b['first_token_s']:>8.0f} ms  {same}"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
