"""Dynamo's router tracks a real engine's chunks while files come and go, and after a restart."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.command import tier
from support.router import free_endpoints, publisher_at
from support.server import free_port
from support.vllm_engine import BLOCK_TOKENS, OUR_MANAGER, make_prompt

from kvtier_sdk import Locality, Medium, make_offload_key
from kvtier_sdk.events import ChunkNote, OffloadingEvent

dynamo = pytest.importorskip(
    "dynamo.llm", reason="Dynamo's router is not here: pip install ai-dynamo-runtime"
)

CHUNKS = 3
SCRIPT = Path(__file__).parents[4] / "examples/fleet/dynamo-indexer.sh"
PROMPT = make_prompt(11, CHUNKS)


class Dynamo:
    """Dynamo's selection service, connected to the endpoints of all workers."""

    def __init__(self, *workers: list[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._service = self._run(self._start(workers))

    async def _start(self, workers: Any) -> Any:
        service = dynamo.SelectionService(indexer_threads=1)
        for number, (events, replay) in enumerate(workers):
            worker = {
                "worker_id": number,
                "endpoint": "http://unused",
                "block_size": BLOCK_TOKENS,
                "kv_events_endpoint": events,
                "replay_endpoint": replay,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 1000,
            }
            await service.upsert_worker(worker)
        return service

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def blocks(self) -> list[int]:
        """Return the number of leading blocks of ``PROMPT`` in each worker's files."""
        asked = self._ask(self._service.overlap_scores)["workers"]
        return [one["disk_blocks"] for one in sorted(asked, key=lambda one: one["worker_id"])]

    def choice(self) -> int:
        return int(self._ask(self._service.select)["worker_id"])

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        async def ask() -> Any:
            return await question({"token_ids": PROMPT})

        return self._run(ask())

    def await_blocks(self, *wanted: int) -> None:
        for _ in range(100):
            if self.blocks() == list(wanted):
                return
            self._run(asyncio.sleep(0.2))
        assert self.blocks() == list(wanted)

    def close(self) -> None:
        self._service.shutdown()
        self._loop.close()


def test_a_router_finds_what_a_restarted_engine_has_in_files(
    start_engine: Any, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/kv"
    endpoints, others = free_endpoints(), free_endpoints()
    offloading = OUR_MANAGER.offloading(url, scan_interval="500ms") | {
        "events_endpoint": endpoints[0],
        "events_replay_endpoint": endpoints[1],
        "events_tokens": True,
    }
    idle = publisher_at(others)
    dynamo_router = Dynamo(others, endpoints)
    try:
        with start_engine(offloading) as engine:
            engine.generate(prompts=[PROMPT])
            engine.settle()
            dynamo_router.await_blocks(0, CHUNKS)
        # The router learns of files that no request of this engine has touched.
        with start_engine(offloading):
            dynamo_router.await_blocks(0, CHUNKS)
            assert dynamo_router.choice() == 1
            # The chunks are removed while the engine is idle, so only its periodic scan notices.
            tier("rm", url, "--all", "--yes")
            dynamo_router.await_blocks(0, 0)
    finally:
        dynamo_router.close()
        idle.close()


def answer(url: str, question: Any = None) -> Any:
    body = None if question is None else json.dumps(question).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as reply:
        return json.load(reply)


def awaited(found: Callable[[], Any], wanted: Any) -> None:
    last = None
    for _ in range(150):
        try:
            last = found()
        except OSError as error:
            last = error
        if last == wanted:
            return
        time.sleep(0.2)
    assert last == wanted


def test_dynamos_indexer_learns_what_engines_had_before_it_started() -> None:
    pytest.importorskip("dynamo.indexer", reason="pip install --no-deps ai-dynamo")
    hosts = ["127.0.0.2", "127.0.0.3"]
    engines = [publisher_at([f"tcp://{host}:{port}" for port in (5557, 5558)]) for host in hosts]
    prompt = list(range(2 * BLOCK_TOKENS))
    first, second = (make_offload_key(bytes([number]) * 32, 0) for number in (1, 2))
    notes = [
        ChunkNote([1], None, prompt[:BLOCK_TOKENS], BLOCK_TOKENS).encode(),
        ChunkNote([2], 1, prompt[BLOCK_TOKENS:], BLOCK_TOKENS).encode(),
    ]
    disk, bucket = (Medium.STORAGE, Locality.LOCAL), (Medium.STORAGE, Locality.REMOTE)
    pool = (Medium.CPU, Locality.LOCAL)
    engines[0].put(OffloadingEvent([first, second], "file", *disk, False, notes))
    engines[1].put(OffloadingEvent([first], "host", *pool, False, notes[:1]))
    engines[1].put(OffloadingEvent([first, second], "s3", *bucket, False, notes))
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = subprocess.Popen(
        ["sh", SCRIPT, "m", str(BLOCK_TOKENS), *hosts],
        env={**os.environ, "PATH": path, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def blocks() -> dict[str, tuple[int, int]]:
        question = {"model_name": "m", "token_ids": prompt}
        found = answer(f"http://127.0.0.1:{port}/query", question)["instances"]
        return {
            number: (one["cpu"] // BLOCK_TOKENS, one["disk"] // BLOCK_TOKENS)
            for number, one in found.items()
        }

    try:
        # The router also counts a chunk in the host pool as a chunk on disk.
        awaited(blocks, {"1": (0, 2), "2": (1, 1)})
        engines[0].put(OffloadingEvent([second], "file", *disk, True))
        awaited(blocks, {"1": (0, 1), "2": (1, 1)})
    finally:
        script.terminate()
        script.wait(timeout=30)
        for engine in engines:
            engine.close()
