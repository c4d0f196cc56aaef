import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import kvtier, tier
from support.redis_server import free_port
from vllm_server import (
    complete,
    make_model,
    make_words,
    metric,
    post,
    serving_model,
    wait_until,
    write_config,
)

PAGE = Path(__file__).parents[4] / "docs" / "operating.md"
BLOCK_TOKENS = 128
CHUNKS = 3
#: Each command's extra options for a run without a terminal, and a part of its output.
EXPECTED = {
    "check CONFIG": ((), ": ok"),
    "tier ls CONFIG": ((), "model"),
    "tier du CONFIG": ((), f"{2 * CHUNKS} chunks"),
    "tier verify CONFIG": ((), f"{2 * CHUNKS} chunks whole, 0 damaged"),
    "tier explain CONFIG --namespace NAMESPACE": ((), f"{2 * CHUNKS} chunks"),
    "tier explain CONFIG --namespace NAMESPACE --tokens TOKENS": ((), "present"),
    "top SOCKET": (("--once",), "host pool of"),
    "events SOCKET --since 1h": ((), "offloads to host, file"),
    "bench URL": (("--total", "8MiB", "--chunk", "64KiB"), "jobs at a time"),
    "plan --trace TRACE --recompute 40ms": ((), "Suggested: pool of"),
    "metrics dashboard": ((), "panels"),
    "metrics rules": ((), "alert:"),
    "tier copy CONFIG DESTINATION": ((), f"{2 * CHUNKS} chunks"),
    "drain SOCKET TIER": ((), "file is out"),
    "resume SOCKET TIER": ((), "file is in"),
    "pin SOCKET SESSION": ((), "the engine is idle; it will do this with its next request"),
    "prefetch SOCKET SESSION": ((), "the engine is idle; it will do this with its next request"),
    "tier rm CONFIG --unused-for 30d --json": (("--yes",), '"ok": true'),
    "tier rm CONFIG#TENANT --all": (("--yes",), f"{2 * CHUNKS} chunks deleted"),
    "tier rm CONFIG --model NAME": (("--yes",), f"{2 * CHUNKS} chunks deleted"),
    "set SOCKET TIER load_deadline=2s": ((), "configured: 5 s"),
}


@pytest.fixture
def words(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start an engine; yield the values for the placeholders in the commands."""
    model, socket, root = (tmp_path / name for name in ("model", "engine.sock", "kv"))
    port = free_port()
    make_model(model)

    config, tenants = tmp_path / "kv.json", tmp_path / "tenants.json"
    services = {"admin_socket": str(socket), "trace_dir": str(tmp_path / "trace")}
    room = {"cpu_bytes_to_use": "32MiB"}
    write_config(config, secondary_tiers=[f"file://{root}?capacity=1GiB"], **room, **services)
    acme = {"type": "file", "name": "acme", "root": str(tmp_path / "copied")}
    write_config(tenants, secondary_tiers=[acme], **room)
    with serving_model(tmp_path, port, config, "--max-model-len 1536"):
        for seed in range(2):
            prompt = make_words(seed, CHUNKS * BLOCK_TOKENS + 5)
            hints = {"kvtier": {"session": "system-prompt"}}
            complete(port, str(model), prompt, kv_transfer_params=hints)
        wait_until(
            lambda: metric(port, "kvtier_stored_chunks_total", tier="file") == 2 * CHUNKS,
            "all is stored",
        )
        tokens = post(port, "/tokenize", {"model": str(model), "prompt": prompt})
        (tmp_path / "tokens.json").write_bytes(tokens)
        (file,) = tier("ls", config)["tiers"]
        yield {
            "CONFIG": str(config),
            "SOCKET": str(socket),
            "TOKENS": str(tmp_path / "tokens.json"),
            "TRACE": str(tmp_path / "trace"),
            "DESTINATION": f"file://{tmp_path}/copied",
            "URL": f"file://{tmp_path}/bench",
            "CONFIG#TENANT": f"{tenants}#acme",
            "NAME": "model",
            "NAMESPACE": file["namespaces"][0]["fingerprint"][:12],
            "SESSION": "system-prompt",
            "TIER": "file",
        }


def test_the_pages_commands_answer(words: dict[str, str]) -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    commands = [found for line in table for found in re.findall(r"`kvtier ([^`]+)`", line)]
    assert commands == list(EXPECTED)
    for command, (more, says) in EXPECTED.items():
        done = kvtier(*(words.get(word, word) for word in command.split()), *more)
        assert (done.returncode, says in done.stdout) == (0, True), (command, done)
