"""The commands on the page for operators work on a running engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.filled import fill, keys_from

from kvtier_sdk import Namespace, RequestContext, TieringConfig
from kvtier_sdk.engine import open_manager, open_pool
from kvtier_vllm.block_hashes import chunk_keys

pytestmark = pytest.mark.reader

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
FACTS: dict[str, Any] = {
    "engine": "vllm 0.32",
    "model": "meta-llama/Llama-3.1-8B",
    "groups": [{"tokens_per_block": 16, "layers": ["a"]}],
    "tokens_per_hash": 16,
    "blocks_per_chunk": 2,
    "hash_algorithm": "sha256",
    "hash_seed": "11" * 32,
}
TOKENS = list(range(1000, 1100))
#: For each command, the options needed without a terminal, and text that it prints.
EXPECTED = {
    "check CONFIG": ((), ": ok"),
    "tier du CONFIG": ((), "meta-llama/Llama-3.1-8B"),
    "tier ls CONFIG": ((), "meta-llama/Llama-3.1-8B"),
    "tier verify CONFIG": ((), "23 chunks whole, 0 damaged"),
    "tier explain CONFIG --namespace NAMESPACE --tokens TOKENS": ((), "present"),
    "tier rm CONFIG --model NAME": (("--yes",), "10 chunks deleted"),
    "tier copy CONFIG DESTINATION": ((), "chunks"),
    "top SOCKET": (("--once",), "file"),
    "plan --trace TRACE --recompute 40ms": ((), "Suggested"),
    "metrics dashboard": ((), "panels"),
    "metrics rules": ((), "alert:"),
    "drain SOCKET TIER": ((), "file is out"),
    "resume SOCKET TIER": ((), "file is in"),
    "tier rm CONFIG#TENANT --all": (("--yes",), "5 chunks deleted"),
    "events SOCKET --since 1h": ((), "offloads to host, file"),
    "bench URL": (("--total", "8MiB", "--chunk", "64KiB"), "jobs at a time"),
}


def commands() -> list[str]:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [found for line in table for found in re.findall(r"`kvtier ([^`]+)`", line)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the values of the page's placeholders while an engine runs."""
    folder = tmp_path_factory.mktemp("operator")
    root, socket = folder / "kv", folder / "engine.sock"
    (prompt,) = chunk_keys(TOKENS, FACTS)
    fill(f"file://{root}", Namespace(FACTS), [*keys_from(0, 20), *prompt])
    fill(f"file://{root}", Namespace({**FACTS, "model": "Qwen/Qwen3-8B"}), keys_from(0, 10))
    (folder / "kv.toml").write_text(
        f'slots = 8\nchunk_bytes = 4096\nadmin_socket = "{socket}"\ntiers = ["file://{root}"]\n'
    )
    fill(f"file://{folder}/acme", Namespace(FACTS), keys_from(0, 5))
    (folder / "tenants.toml").write_text(f'slots = 8\ntiers = ["file://{folder}/acme"]\n')
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    line = {"input_length": 64, "output_length": 1, "hash_ids": [1, 2]}
    line["chunk_bytes"] = 4096
    (folder / "trace.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    config = TieringConfig.from_file(folder / "kv.toml")
    with open_pool(config) as pool, open_manager(pool, config, Namespace(FACTS)) as manager:
        manager.on_new_request(RequestContext("A"))
        yield {
            "CONFIG": str(folder / "kv.toml"),
            "URL": f"file://{root}",
            "SOCKET": str(socket),
            "TOKENS": str(folder / "tokens.json"),
            "TRACE": str(folder / "trace.jsonl"),
            "DESTINATION": f"file://{folder}/copied",
            "CONFIG#TENANT": f"{folder}/tenants.toml#file",
            "NAME": "qwen",
            "NAMESPACE": Namespace(FACTS).for_chunks(4096).fingerprint[:12],
            "TIER": "file",
        }


def test_the_page_names_the_commands_that_are_tried() -> None:
    assert commands() == list(EXPECTED)


@pytest.mark.parametrize("command", EXPECTED)
def test_a_command_answers(command: str, words: dict[str, str]) -> None:
    more, says = EXPECTED[command]
    done = kvtier(*(words.get(word, word) for word in command.split()), *more)
    assert done.returncode == 0, done.stderr + done.stdout
    assert says in done.stdout
