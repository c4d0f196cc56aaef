"""A restarted engine reports what hits saved, and answers the questions of docs/operating.md."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    wait_for,
    wait_until,
    write_config,
)

PAGE = Path(__file__).parents[4] / "docs" / "operating.md"
BLOCK_TOKENS = 128
CHUNKS = 6
PROMPTS = [make_words(seed, CHUNKS * BLOCK_TOKENS + 5) for seed in range(5)]
STORED = len(PROMPTS) * CHUNKS
TOKENS = STORED * BLOCK_TOKENS
SESSION = "system-prompt"
#: Each command's extra options for a run without a terminal, and a part of its output.
EXPECTED = {
    "check CONFIG": ((), ": ok"),
    "tier ls CONFIG": ((), "model"),
    "tier du CONFIG": ((), f"{STORED} chunks"),
    "tier verify CONFIG": ((), f"{STORED} chunks whole, 0 damaged"),
    "tier explain CONFIG --namespace NAMESPACE": ((), f"{STORED} chunks"),
    "tier explain CONFIG --namespace NAMESPACE --tokens TOKENS": ((), "present"),
    "top SOCKET": (("--once",), "host pool of"),
    "events SOCKET --since 1h": ((), "offloads to host, file"),
    "bench URL": (("--total", "8MiB", "--chunk", "64KiB"), "jobs at a time"),
    "plan --trace TRACE --recompute 40ms": ((), "Suggested: pool of"),
    "metrics dashboard": ((), "panels"),
    "metrics rules": ((), "alert:"),
    "tier copy CONFIG DESTINATION": ((), f"{STORED} chunks"),
    "drain SOCKET TIER": ((), "file is out"),
    "resume SOCKET TIER": ((), "file is in"),
    "pin SOCKET SESSION": ((), "the engine is idle; it will do this with its next request"),
    "prefetch SOCKET SESSION": ((), "the engine is idle; it will do this with its next request"),
    "tier rm CONFIG --unused-for 30d --json": (("--yes",), '"ok": true'),
    "tier rm CONFIG#TENANT --all": (("--yes",), f"{STORED} chunks deleted"),
    "tier rm CONFIG --model NAME": (("--yes",), f"{STORED} chunks deleted"),
    "set SOCKET TIER load_deadline=2s": ((), "configured: 5 s"),
}


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.model, self.socket = str(folder / "model"), folder / "kvtier.sock"
        self.config, self.trace = folder / "kv.json", folder / "trace"
        make_model(Path(self.model))

    @contextmanager
    def running(self, **options: object) -> Iterator[None]:
        write_config(
            self.config,
            cpu_bytes_to_use="64MiB",
            secondary_tiers=[f"file://{self.folder}/kv?capacity=1GiB"],
            admin_socket=str(self.socket),
            **options,
        )
        model = "--max-model-len 1536 --num-gpu-blocks-override 14"
        with serving_model(self.folder, self.port, self.config, model, VLLM_LOG_STATS_INTERVAL="1"):
            yield

    def ask_all(self) -> None:
        for prompt in PROMPTS:
            hints = {"kvtier": {"session": SESSION}}
            complete(self.port, self.model, prompt, kv_transfer_params=hints)

    def saved(self, name: str, tier: str) -> float:
        return metric(self.port, f"kvtier_saved_{name}_total", tier=tier, model=self.model)

    def kvtier(self, *words: str) -> str:
        done = kvtier(words[0], self.socket, *words[1:])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lines(self) -> list[str]:
        """Return the log's lines about transfers."""
        log = (self.folder / "serve.log").read_text()
        return [line for line in log.splitlines() if "KV Transfer metrics" in line]

    def logged(self, name: str) -> int:
        found = re.findall(rf"kvtier_{name}_total=(\d+)", "\n".join(self.lines()))
        return sum(map(int, found))

    def words(self) -> Mapping[str, str]:
        """Return the values for the placeholders in the page's commands."""
        tenants, tokens = self.folder / "tenants.json", self.folder / "tokens.json"
        acme = {"type": "file", "name": "acme", "root": str(self.folder / "copied")}
        write_config(tenants, secondary_tiers=[acme], cpu_bytes_to_use="32MiB")
        prompt = {"model": self.model, "prompt": PROMPTS[0]}
        tokens.write_bytes(post(self.port, "/tokenize", prompt))
        (file,) = tier("ls", self.config)["tiers"]
        return {
            "CONFIG": str(self.config),
            "SOCKET": str(self.socket),
            "TOKENS": str(tokens),
            "TRACE": str(self.trace),
            "DESTINATION": f"file://{self.folder}/copied",
            "URL": f"file://{self.folder}/bench",
            "CONFIG#TENANT": f"{tenants}#acme",
            "NAME": "model",
            "NAMESPACE": file["namespaces"][0]["fingerprint"][:12],
            "SESSION": SESSION,
            "TIER": "file",
        }


def test_a_restarted_engine_knows_what_hits_save_and_answers_the_page(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.running():
        server.ask_all()
        wait_for(server.port, "kvtier_stored_chunks_total", STORED, tier="file")
        assert server.saved("tokens", "file") == 0
        # kvtier must write the speed while the engine runs, because vLLM may kill the engine.
        wait_until(lambda: "a chunk is computed in" in server.kvtier("events"), "it is written")
        chunk_s = metric(server.port, "kvtier_recompute_seconds")
        told = ("misses", "stored_object_bytes")
        wait_until(lambda: all(map(server.logged, told)), "the log tells it")
    with server.running(trace_dir=str(server.trace)):
        server.ask_all()
        wait_until(lambda: server.saved("tokens", "file") == TOKENS, "all tokens are saved")
        assert server.saved("tokens", "host") == 0
        saved_s = server.saved("prefill_seconds", "file")
        # The measured speed may have changed since the test read it.
        assert saved_s == pytest.approx(chunk_s * TOKENS / BLOCK_TOKENS, rel=0.5)
        assert f"saved: {TOKENS:,} tokens, " in server.kvtier("top", "--once", "--interval", "1s")
        assert server.kvtier("events").count("offloads to host, file") == 2
        wait_until(lambda: server.logged("saved_tokens") == TOKENS, "the log tells it")
        check_that_the_pages_commands_answer(server.words())
    check_that_vllms_log_line_of_transfers_is_short(server.lines())


def check_that_the_pages_commands_answer(words: Mapping[str, str]) -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    commands = [found for line in table for found in re.findall(r"`kvtier ([^`]+)`", line)]
    assert commands == list(EXPECTED)
    for command, (more, says) in EXPECTED.items():
        done = kvtier(*(words.get(word, word) for word in command.split()), *more)
        assert (done.returncode, says in done.stdout) == (0, True), (command, done)


def check_that_vllms_log_line_of_transfers_is_short(lines: list[str]) -> None:
    assert max(map(len, lines)) < 1024, max(lines, key=len)
    named = {name for line in lines for name in re.findall(r"(kvtier_\w+)=", line)}
    assert named == {
        f"kvtier_{name}_total"
        for name in (
            *("hit_chunks", "misses", "saved_tokens"),
            *("stored_object_bytes", "loaded_object_bytes"),
        )
    }
    assert any("vllm:kv_offload_load_bytes=" in line for line in lines), "vLLM's own are whole"
