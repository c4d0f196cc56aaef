"""``vllm serve`` follows hints from clients and operators, and joins clients' traces."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.redis_server import free_port
from trace_collector import Collector, collecting
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

PAGE = Path(__file__).parents[4] / "docs" / "agents.md"
BLOCK_TOKENS = 128
#: Chunks per prompt. Hints may use a quarter of the pool's 64 slots, enough for one prompt.
CHUNKS = 10
#: Number of prompts in a flood: enough to fill the pool twice and the device many times.
FLOOD = 13


class Server:
    def __init__(self, folder: Path, model: Path, port: int) -> None:
        self.socket = folder / "kvtier.sock"
        self._log = folder / "serve.log"
        self.model = str(model)
        self.url = f"http://127.0.0.1:{port}/v1"
        self._port = port
        self._floods = 0

    def ask(self, prompt: str, hints: object = None, **options: Any) -> dict[str, Any]:
        if hints is not None:
            options["kv_transfer_params"] = {"kvtier": hints}
        return complete(self._port, self.model, prompt, **options)

    def ask_traced(self, prompt: str, traceparent: str) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4}
        post(self._port, "/v1/completions", body, traceparent=traceparent)

    def cached_chunks(self, prompt: str, hints: object = None) -> tuple[int, int, int]:
        """Send the prompt; return the numbers of cached chunks, of pool hits and of tier hits."""
        self.rest()
        before = [self.count("hit_chunks", tier=tier) for tier in ("host", "file")]
        details = self.ask(prompt, hints)["usage"]["prompt_tokens_details"] or {}
        cached = details.get("cached_tokens", 0) // BLOCK_TOKENS
        self.rest()
        after = [self.count("hit_chunks", tier=tier) for tier in ("host", "file")]
        in_pool, in_files = (int(b - a) for a, b in zip(before, after, strict=True))
        return cached, in_pool, in_files

    def rest(self) -> None:
        """Wait until the metrics include all work so far."""
        lookups = self.count("hints", verb="resume_in", outcome="accepted")
        self.ask("word1", {"resume_in": 60}, max_tokens=1)
        wait_for(
            self._port, "kvtier_hints_total", lookups + 1, verb="resume_in", outcome="accepted"
        )

    def flood(self) -> None:
        """Evict all chunks from the device, and chunks without hints from the pool."""
        for _ in range(FLOOD):
            self._floods += 1
            self.ask(make_words(-self._floods, CHUNKS * BLOCK_TOKENS + 5), max_tokens=1)

    def count(self, name: str, **labels: str) -> float:
        return metric(self._port, f"kvtier_{name}_total", **labels)

    def receipts(self, verb: str, outcome: str) -> float:
        return self.count("hints", verb=verb, outcome=outcome)

    def log(self) -> str:
        return self._log.read_text()

    def command(self, *words: str) -> str:
        done = kvtier(words[0], self.socket, *words[1:])
        return (done.stdout + done.stderr).strip()

    @contextmanager
    def busy(self) -> Iterator[None]:
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                self.ask("word1 word2", max_tokens=2)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    model, port = folder / "model", free_port()
    make_model(model)
    server = Server(folder, model, port)
    config = folder / "offloading.json"
    write_config(
        config,
        cpu_bytes_to_use="32MiB",
        secondary_tiers=[f"file://{folder}/kv?capacity=1GiB"],
        admin_socket=str(server.socket),
    )
    # Let the device hold little more than one prompt, so that it evicts earlier prompts.
    options = "--enable-prompt-tokens-details --max-model-len 1536 --num-gpu-blocks-override 14"
    options += f" --otlp-traces-endpoint {collector.url}"
    tracing = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with serving_model(folder, port, config, options, **tracing):
        yield server


def words(seed: int, chunks: int = CHUNKS) -> str:
    return make_words(seed, chunks * BLOCK_TOKENS + 5)


def test_a_pinned_prompt_outlives_other_traffic_in_the_pool(server: Server) -> None:
    pinned, other = words(1), words(2)
    server.ask(pinned, {"session": "chat 7", "pin": "5m"})
    server.ask(other)
    server.flood()
    assert server.cached_chunks(pinned) == (CHUNKS, CHUNKS, 0)
    assert server.cached_chunks(other)[1] == 0
    assert server.receipts("pin", "accepted") == 1
    told = f"host: pin for session 'chat 7': accepted, {CHUNKS} chunks, 300 s"
    assert told in server.log()
    server.ask(pinned, {"session": "chat 7", "end": True})
    server.flood()
    assert server.cached_chunks(pinned)[1] == 0


def test_a_prefetched_session_is_in_the_pool_at_its_next_turn(server: Server) -> None:
    for is_prefetched in (False, True):
        session, prompt = f"task {is_prefetched:d}", words(100 + is_prefetched)
        server.ask(prompt, {"session": session})
        server.flood()
        if is_prefetched:
            accepted = server.receipts("prefetch", "accepted")
            server.ask("word3", {"prefetch": session})
            with server.busy():
                wait_until(
                    lambda before=accepted: server.receipts("prefetch", "accepted") > before,
                    f"a receipt for {session}",
                )
        _, in_pool, _ = server.cached_chunks(prompt + " word4", {"session": session})
        assert in_pool == (CHUNKS if is_prefetched else 0)


def test_the_agents_page_gives_hints_to_an_engine(server: Server) -> None:
    from openai import OpenAI

    deferred = server.receipts("prefetch", "deferred")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with OpenAI(base_url=server.url, api_key="none") as client:
        names = {
            "client": client,
            "model": server.model,
            "messages": [{"role": "user", "content": words(400, 2)}],
            "conversation_id": "chat 8",
            "expected_tool_s": 600,
        }
        exec(code, names)
    assert names["answer"].choices[0].message.content
    server.rest()
    assert server.receipts("prefetch", "deferred") == deferred + 1
    with server.busy():
        told = server.command("pin", "chat 8", "--for", "1m")
    # An answer adds no chunks, because vLLM offloads only the prompt's chunks.
    assert told.startswith("pin for session 'chat 8': ")
    assert ", 2 chunks, 60 s" in told


def test_requests_with_bad_hints_are_answered(server: Server) -> None:
    bad: list[object] = ["pin", {"pin": float("nan")}, {"pim": "5m"}, {"session": "x" * 2**20}]
    for number, hints in enumerate(bad):
        answer = server.ask(words(200 + number, 1), hints)
        assert answer["choices"][0]["finish_reason"] == "length"
    server.rest()
    assert server.receipts("unknown", "refused") == len(bad)
    # The log shows only the first refusal of each minute.
    assert ": refused, 0 chunks: kvtier: write a table such as" in server.log()


def test_commands_move_a_sessions_chunks(server: Server) -> None:
    prompt = words(300)
    server.ask(prompt, {"session": "system-prompt"})
    server.rest()
    idle = "the engine is idle; it will do this with its next request"
    wait_until(lambda: server.command("pin", "system-prompt") == idle, "the engine is idle")
    server.flood()
    assert server.cached_chunks(prompt)[1] == CHUNKS
    with server.busy():
        assert server.command("pin", "nobody") == (
            "pin for session 'nobody': refused, 0 chunks: no chunks of session 'nobody' are known"
        )
        told = server.command("pin", "system-prompt", "--for", "1h")
        assert told == f"pin for session 'system-prompt': accepted, {CHUNKS} chunks, 3600 s"
        assert "accepted" in server.command("forget", "system-prompt")
    assert server.cached_chunks(prompt)[1] == 0
    server.ask(prompt, {"session": "system-prompt"})
    server.flood()
    with server.busy():
        told = server.command("prefetch", "system-prompt")
        assert told == f"prefetch for session 'system-prompt': accepted, {CHUNKS} chunks"
    server.ask(words(301, 10))
    assert server.cached_chunks(prompt)[1] == CHUNKS


def test_spans_join_the_trace_of_a_request(server: Server, collector: Collector) -> None:
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    prompt = words(500)
    for name in ("kvtier.store", "kvtier.load"):
        server.ask_traced(prompt, f"00-{trace_id}-{caller}-01")
        server.flood()
        wait_until(lambda name=name: name in collector.in_trace(trace_id), name)
    spans = collector.in_trace(trace_id)
    assert {"kvtier.lookup", "kvtier.store", "kvtier.load", "llm_request"} <= spans.keys()
    assert {one.parent_span_id.hex() for one in spans.values()} == {caller}
    load = {one.key: one.value for one in spans["kvtier.load"].attributes}
    assert load["kvtier.tier"].string_value == "file"
    assert load["kvtier.loaded_chunks"].int_value == CHUNKS
    told = {one.key: one.value.string_value for one in spans["llm_request"].attributes}
    assert load["kvtier.request_id"].string_value.startswith(told["gen_ai.request.id"])
    untraced = [
        one for one in collector.spans if one.name == "kvtier.store" and not one.parent_span_id
    ]
    assert len(untraced) >= 2 * FLOOD
