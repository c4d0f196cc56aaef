"""Two servers store the chunks of two tenants, and then an operator deletes one tenant."""

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.redis_server import free_port
from vllm_server import (
    complete,
    make_model,
    make_words,
    metric,
    name_vllm,
    post,
    serving_model,
    wait_until,
)

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "operating.md"
BLOCK_TOKENS = 128
CHUNKS = 4


class Fleet:
    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder = folder
        self.config = folder / "kv.json"
        self.ports = ports
        (body,) = re.findall(r"```json\n(.*cache_salt.*)\n```", PAGE.read_text())
        self._body: str = body

    def ask(self, engine: int, tenant: str, prompt: str) -> int:
        """Send a request as in docs/operating.md; return the number of cached chunks."""
        options = json.loads(self._body.replace("acme", tenant))
        answer = complete(
            self.ports[engine], str(self.folder / "model"), prompt, max_tokens=1, **options
        )
        details = answer["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens", 0)) // BLOCK_TOKENS

    def reset_device(self, engine: int) -> None:
        post(self.ports[engine], "/reset_prefix_cache", {})

    def stored(self, engine: int, tier: str) -> float:
        return metric(self.ports[engine], "kvtier_stored_chunks_total", tier=tier)

    def explained(self, tenant: str, prompt: str) -> list[list[str]]:
        """Return the chunks' states, first with vLLM's tokens, then with the tokenizer's tokens."""
        model, tokens, text = (self.folder / of for of in ("model", "tokens.json", "prompt.txt"))
        text.write_text(prompt)
        body = {"model": str(model), "prompt": prompt}
        tokens.write_bytes(post(self.ports[0], "/tokenize", body))
        salt = json.loads(self._body.replace("acme", tenant))["cache_salt"]
        words = ("tier", "explain", f"{self.config}#{tenant}", "--salt", salt)
        ways = (("--tokens", str(tokens)), ("--text", str(text), "--tokenizer", str(model)))
        return [self.run(*words, *way)["tiers"][0]["states"][0] for way in ways]

    def run(self, *words: str) -> dict[str, Any]:
        done = kvtier(*words, "--json")
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def pools(self) -> list[int]:
        """Return the number of readable chunks in each engine's pool."""
        sockets = (self.folder / "run").glob("kvtier-*.sock")
        return [self.run("top", str(one), "--once")["pool"]["ready"] for one in sockets]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Start two servers with examples/tenants.json, but in ``tmp_path`` and with a smaller pool."""
    make_model(tmp_path / "model")
    name_vllm(tmp_path / "site")
    for tenant in ("acme", "globex"):
        (tmp_path / tenant).mkdir(mode=0o700)
        keys = tmp_path / f"{tenant}.keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{secrets.token_hex(32)}\n")
    (tmp_path / "run").mkdir()
    fleet = Fleet(tmp_path, [free_port(), free_port()])
    text = (ROOT / "examples" / "tenants.json").read_text()
    for there, here in {
        "/data/kv": tmp_path,
        "/etc/kvtier": tmp_path,
        "/run/kvtier": tmp_path / "run",
        "40GiB": "32MiB",
    }.items():
        text = text.replace(there, str(here))
    fleet.config.write_text(text)
    options = "--enable-prompt-tokens-details --max-model-len 1536 --num-gpu-blocks-override 14"
    servers = [
        serving_model(tmp_path, port, fleet.config, options, VLLM_SERVER_DEV_MODE="1")
        for port in fleet.ports
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        list(threads.map(stack.enter_context, servers))
        yield fleet


def test_a_forgotten_tenant_is_gone_everywhere(fleet: Fleet, tmp_path: Path) -> None:
    prompt = make_words(1, CHUNKS * BLOCK_TOKENS + 5)
    for tenant in ("acme", "globex"):
        assert fleet.ask(0, tenant, prompt) == 0, "tenants do not see each other's chunks"
        wait_until(lambda of=tenant: fleet.stored(0, of) == CHUNKS, f"{tenant} is stored")
        assert fleet.ask(1, tenant, prompt) == CHUNKS, "engines share a tenant's chunks"
        assert fleet.explained(tenant, prompt) == [["present"] * CHUNKS] * 2
    found = fleet.run("tier", "du", str(fleet.config))["tiers"]
    assert {one["name"]: one["chunks"] for one in found} == {"acme": CHUNKS, "globex": CHUNKS}
    shutil.copytree(tmp_path / "acme", tmp_path / "backup")

    receipt = fleet.run("tier", "rm", f"{fleet.config}#acme", "--all", "--yes")
    assert [(one["tier"], one["deleted"]) for one in receipt["removed"]] == [("acme", CHUNKS)]
    assert receipt["ok"]
    assert len(receipt["engines"]) == 2
    assert not any("fault" in one for one in receipt["engines"])
    for engine in range(2):
        fleet.reset_device(engine)
        fleet.ask(engine, "nobody", "word1")
    assert fleet.pools() == [0, 0]
    verified = fleet.run("tier", "verify", str(fleet.config))["namespaces"]
    assert {one["tier"]: one["whole"] for one in verified} == {"acme": 0, "globex": CHUNKS}
    sizes = [path.stat().st_size for path in (tmp_path / "acme").rglob("*") if path.is_file()]
    assert max(sizes) < 64 * 1024, "no chunk's bytes are left"
    for engine in range(2):
        assert fleet.ask(engine, "globex", prompt) == CHUNKS, "the other tenant's are still there"
    assert fleet.ask(0, "acme", prompt) == 0

    # Without the tenant's deleted keys, an earlier copy of its chunks cannot be read.
    keys = tmp_path / "new.keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{secrets.token_hex(32)}\n")
    copied = f"file://{tmp_path / 'backup'}?codec=aes-gcm:{keys}"
    (found,) = fleet.run("tier", "verify", copied)["namespaces"]
    assert (found["whole"], found["not_opened"]) == (0, CHUNKS)
