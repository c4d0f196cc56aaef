"""The README's steps from an empty environment to a tier under ``vllm serve``."""

import json
import os
import re
import signal
import subprocess
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.redis_server import free_port

ROOT = Path(__file__).parents[4]
#: Number of words in the prompt, enough for several blocks of 128 tokens.
WORDS = 400
_START_S = 300.0
#: Settings of a small engine on a CPU, added to the README's command.
_ENGINE = "--dtype float32 --enforce-eager --max-model-len 1024 --port {port}"
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    section = text.partition("\n## Run it under vLLM\n")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[:1]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def make_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    purelib = Path(sysconfig.get_path("purelib"))
    shared = folder / "shared"
    shared.mkdir()
    for found in purelib.iterdir():
        if "kvtier" not in found.name and found.suffix != ".pth":
            (shared / found.name).symlink_to(found)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "shared.pth").write_text(str(shared))
    # vLLM looks up its version under the name "vllm", but the CPU build has another name.
    (own / "vllm-0.32.0+cpu.dist-info").mkdir()
    (own / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0+cpu\n")
    program = folder / "bin" / "vllm"
    program.write_text(
        f"#!{folder}/bin/python\n"
        "from vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n"  # vLLM's processes import this file too
        "    raise SystemExit(main())\n"
    )
    program.chmod(0o755)
    return program.parent


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
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


WORD_LIST = [f"word{number}" for number in range(100)]
PROMPT = " ".join(WORD_LIST[number * 7 % 100] for number in range(WORDS))


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
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert engine.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, log.read_text()[-4000:]
            time.sleep(0.2)
        yield engine
    finally:
        engine.send_signal(signal.SIGINT)
        engine.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def complete(port: int, model: Path) -> str:
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        document: dict[str, Any] = json.load(answer)
    return str(document["choices"][0]["text"])


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def wait_for(port: int, name: str, value: float) -> None:
    deadline_s = time.monotonic() + 60
    while metric(port, name) < value:
        assert time.monotonic() < deadline_s, f"{name} is {metric(port, name)}"
        time.sleep(0.5)


def test_five_commands_lead_to_a_verified_tier(tmp_path: Path) -> None:
    programs = make_environment(tmp_path / "env")
    model, chunks, port = tmp_path / "model", tmp_path / "kv", free_port()
    make_model(model)
    asked = commands()
    assert len(asked) == 5
    told = {"/data/kv": str(chunks), "200GiB": "1GiB", "32GiB": "256MiB", "MODEL": str(model)}
    variables = {**os.environ, **_VARIABLES, "PATH": f"{programs}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)

    def run(command: str) -> str:
        for word, own in told.items():
            command = command.replace(word, own)
        place = ROOT if command.startswith("pip ") else tmp_path
        done = subprocess.run(
            ["bash", "-c", command], cwd=place, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    install, configure, check, serve, look = asked
    run(install)
    run(configure)
    assert "ok" in run(check).splitlines()[-1]
    for word, own in told.items():
        serve = serve.replace(word, own)
    serve += " " + _ENGINE.format(port=port)
    with serving(serve, variables, tmp_path, port):
        first = complete(port, model)
        wait_for(port, "kvtier_stored_chunks_total", WORDS // 128)
    with serving(serve, variables, tmp_path, port):
        assert complete(port, model) == first
        wait_for(port, "kvtier_hit_chunks_total", WORDS // 128)
    assert str(model) in run(look)
