"""``vllm serve`` on two nodes, each with a disk, that share a bucket, as in docs/fleet.md."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.router import Router, free_endpoints
from support.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server
from support.server import free_port
from vllm_server import complete, make_model, make_words, metric, post, serving_model, wait_for

PAGE = Path(__file__).parents[4] / "examples/fleet/node-local.json"
BLOCK_TOKENS, CHUNKS = 128, 3
#: More prompts than the host pool can hold.
FILLING_PROMPTS = 14
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY}
PROMPT = make_words(0, CHUNKS * BLOCK_TOKENS + 5)


class Node:
    """An engine with the example's configuration, and a router that receives its events."""

    def __init__(self, folder: Path, port: int, router: Router) -> None:
        self._model, self._port, self._router = str(folder / "model"), port, router
        asked = {"model": self._model, "prompt": PROMPT}
        self._tokens = json.loads(post(port, "/tokenize", asked))["tokens"]

    def answer(self) -> Any:
        choice = complete(self._port, self._model, PROMPT, max_tokens=16, logprobs=1)["choices"][0]
        return choice["logprobs"]["tokens"]

    def chunks(self, name: str, tier: str) -> float:
        return metric(self._port, f"kvtier_{name}_chunks_total", tier=tier)

    def await_stored(self, tier: str, chunks: int) -> None:
        wait_for(self._port, "kvtier_stored_chunks_total", chunks, tier=tier)

    def push_out(self) -> None:
        """Evict the chunks of ``PROMPT`` by filling the host pool with other prompts."""
        for seed in range(1, FILLING_PROMPTS + 1):
            other = make_words(seed, CHUNKS * BLOCK_TOKENS + 5)
            complete(self._port, self._model, other, max_tokens=1)

    def hear(self) -> None:
        self._router.catch_up()

    def told(self, medium: str, locality: str) -> int:
        """Return how many chunks of ``PROMPT`` have this medium and locality in the events."""
        blocks = [
            self._tokens[at : at + BLOCK_TOKENS]
            for at in range(0, CHUNKS * BLOCK_TOKENS, BLOCK_TOKENS)
        ]
        there: dict[int, list[int]] = {}
        for event in self._router.events:
            if (event.get("medium"), event.get("locality")) != (medium, locality):
                continue
            for number, block in enumerate(event["block_hashes"]):
                there.pop(block, None)
                if event["type"] == "BlockStored":
                    at = number * event["block_size"]
                    there[block] = event["token_ids"][at : at + event["block_size"]]
        return sum(block in blocks for block in there.values())

    def forget_device(self) -> None:
        post(self._port, "/reset_prefix_cache", {})


@contextmanager
def node(folder: Path, name: str, server: S3Server) -> Iterator[Node]:
    config = json.loads(PAGE.read_text())
    extra = config["kv_connector_extra_config"]
    endpoints = free_endpoints()
    on_disk, shared = extra["secondary_tiers"]
    on_disk |= {"root": str(folder / name), "capacity": "1GiB"}
    shared["endpoint"] = server.endpoint
    for tier in (on_disk, shared):
        tier["lookup_deadline"] = "30s"
    # The pool holds 11 prompts and keeps room free for one. LRU evicts the oldest prompt first.
    # The long recompute time makes every load worthwhile.
    extra |= {"cpu_bytes_to_use": "16MiB", "eviction_policy": "lru", "recompute": "1h"}
    extra |= {"events_endpoint": endpoints[0], "events_replay_endpoint": endpoints[1]}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    port = free_port()
    variables = {**CREDENTIALS, "VLLM_SERVER_DEV_MODE": "1"}
    # Without a timeout, vLLM kills its processes before kvtier writes the last notes for routers.
    options = "--max-model-len 1536 --shutdown-timeout 30"
    with serving_model(folder, port, path, options, **variables):
        router = Router(*endpoints)
        try:
            yield Node(folder, port, router)
        finally:
            router.close()


def test_a_chunk_goes_from_one_node_through_the_bucket_to_the_disk_of_another(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model")
    with S3Server(tmp_path) as server:
        with node(tmp_path, "one", server) as one:
            computed = one.answer()
            one.await_stored("s3", CHUNKS)
            one.push_out()
            one.hear()
            assert one.told("STORAGE", "LOCAL") == CHUNKS
            assert one.chunks("loaded", "s3") == one.chunks("loaded", "file") == 0
        with node(tmp_path, "other", server) as other:
            other.hear()
            assert other.told("STORAGE", "REMOTE") == CHUNKS
            assert other.answer() == computed
            assert other.chunks("loaded", "s3") == CHUNKS
            assert other.chunks("loaded", "file") == 0
            other.hear()
            assert other.told("CPU", "LOCAL") == CHUNKS
            other.push_out()
            other.hear()
            assert other.told("STORAGE", "LOCAL") == CHUNKS
            before = [other.chunks("loaded", tier) for tier in ("s3", "file")]
            server.kill()
            other.forget_device()
            assert other.answer() == computed
            after = [other.chunks("loaded", tier) for tier in ("s3", "file")]
            assert after == [before[0], before[1] + CHUNKS]
