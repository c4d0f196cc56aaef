"""The metrics, vLLM's log and ``kvtier`` report the savings from hits, also after a restart."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import kvtier
from support.redis_server import free_port
from vllm_server import (
    complete,
    make_model,
    make_words,
    metric,
    serving_model,
    wait_for,
    wait_until,
    write_config,
)

BLOCK_TOKENS = 128
CHUNKS = 6
PROMPTS = [make_words(seed, CHUNKS * BLOCK_TOKENS + 5) for seed in range(5)]
TOKENS = len(PROMPTS) * CHUNKS * BLOCK_TOKENS


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.model, self.socket = str(folder / "model"), folder / "kvtier.sock"
        make_model(Path(self.model))

    @contextmanager
    def running(self) -> Iterator[None]:
        write_config(
            self.folder / "kv.json",
            cpu_bytes_to_use="64MiB",
            secondary_tiers=[f"file://{self.folder}/kv?capacity=1GiB"],
            admin_socket=str(self.socket),
        )
        options = "--max-model-len 1536 --num-gpu-blocks-override 14"
        place = self.folder, self.port, self.folder / "kv.json"
        with serving_model(*place, options, VLLM_LOG_STATS_INTERVAL="1"):
            yield

    def ask_all(self) -> None:
        for prompt in PROMPTS:
            complete(self.port, self.model, prompt)

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("saved"))


def test_a_restarted_engine_that_only_serves_hits_knows_what_they_save(server: Server) -> None:
    with server.running():
        server.ask_all()
        stored = {"tier": "file"}
        wait_for(server.port, "kvtier_stored_chunks_total", len(PROMPTS) * CHUNKS, **stored)
        assert server.saved("tokens", "file") == 0
        # kvtier must write the speed while the engine runs, because vLLM may kill the engine.
        wait_until(lambda: "a chunk is computed in" in server.kvtier("events"), "it is written")
        chunk_s = metric(server.port, "kvtier_recompute_seconds")
        told = ("misses", "stored_object_bytes")
        wait_until(lambda: all(map(server.logged, told)), "the log tells it")
    with server.running():
        server.ask_all()
        wait_until(lambda: server.saved("tokens", "file") == TOKENS, "all tokens are saved")
        assert server.saved("tokens", "host") == 0
        saved_s = server.saved("prefill_seconds", "file")
        # The measured speed may have changed since the test read it.
        assert saved_s == pytest.approx(chunk_s * TOKENS / BLOCK_TOKENS, rel=0.5)
        assert f"saved: {TOKENS:,} tokens, " in server.kvtier("top", "--once", "--interval", "1s")
        events = server.kvtier("events")
        assert events.count("offloads to host, file") == 2
        wait_until(lambda: server.logged("saved_tokens") == TOKENS, "the log tells it")


def test_vllms_log_line_of_transfers_is_short(server: Server) -> None:
    lines = server.lines()
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
