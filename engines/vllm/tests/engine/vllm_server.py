"""``vllm serve`` on a CPU, with a small model whose prompts are words."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_START_S = 300.0
_PATIENCE_S = 60.0
OPTIONS = "--dtype float32 --enforce-eager"
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
WORD_LIST = [f"word{number}" for number in range(100)]


def make_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *WORD_LIST])}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)


def make_words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORD_LIST, k=count))


def write_config(path: Path, **options: object) -> None:
    extra = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier_vllm", **options}
    roles = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    path.write_text(json.dumps({**roles, "kv_connector_extra_config": extra}))


def name_vllm(site: Path) -> None:
    """Declare vLLM's version under the name "vllm", because the CPU build has another name."""
    metadata = site / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: vllm\nVersion: 0.32.0+cpu\n")


@contextmanager
def serving(
    command: str, variables: dict[str, str], folder: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    log = folder / "serve.log"
    with log.open("ab") as output:
        words = ["bash", "-c", f"exec {command}"]
        engine = subprocess.Popen(words, cwd=folder, env=variables, stdout=output, stderr=output)
    try:
        deadline_s = time.monotonic() + _START_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert engine.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, log.read_text()[-4000:]
            time.sleep(0.2)
        yield engine
    finally:
        engine.send_signal(signal.SIGINT)
        engine.wait(60)


@contextmanager
def serving_model(
    folder: Path, port: int, config: Path, options: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    if not (folder / "site").exists():
        name_vllm(folder / "site")
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    command = (
        f"{sys.executable} -m vllm.entrypoints.cli.main serve {folder / 'model'} {OPTIONS} "
        f'--port {port} --kv-transfer-config "$(cat {config})" {options} '
        "--distributed-executor-backend uni"
    )
    # Let one process be engine core and worker, as for one GPU, because importing vLLM takes 8 s.
    # The quick start's test has vLLM's default for CPUs.
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    variables = {**VARIABLES, **one_process, "PYTHONPATH": path.rstrip(os.pathsep), **variables}
    with serving(command, {**os.environ, **variables}, folder, port) as engine:
        yield engine


def post(port: int, path: str, body: object, **headers: str) -> bytes:
    url, headers = f"http://127.0.0.1:{port}{path}", {"Content-Type": "application/json"} | headers
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return bytes(answer.read())


def complete(port: int, model: str, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
    document: dict[str, Any] = json.loads(post(port, "/v1/completions", body))
    return document


def metric(port: int, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def wait_for(port: int, name: str, value: float, **labels: str) -> None:
    wait_until(lambda: metric(port, name, **labels) >= value, f"{name} is {value}")


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {_PATIENCE_S:g} s: {what}"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
