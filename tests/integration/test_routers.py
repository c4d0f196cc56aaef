"""An idle engine announces all changes to a file tier's chunks, even changes by other processes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

pytest.importorskip("zmq")

from support.command import kvtier
from support.keys import OURS, write_keys
from support.live import Live, live
from support.router import Router, free_endpoints

from kvtier_sdk import make_offload_key
from kvtier_sdk.engine import ChunkNote

KEYS = [make_offload_key(n.to_bytes(32, "big")) for n in range(1, 5)]
#: Tokens that are easy to find in a file.
TOKENS = [0x7A3B1F] * 16


@pytest.fixture
def options() -> dict[str, Any]:
    events, replay = free_endpoints()
    return {"events_endpoint": events, "events_replay_endpoint": replay, "events_tokens": True}


def url(directory: Path, **options: str) -> str:
    return f"file://{directory}/kv?{urlencode({'scan_interval': '200ms', **options})}"


def make_note(block: int) -> ChunkNote:
    return ChunkNote([block], block - 1 if block else None, TOKENS, 16)


def store(engine: Live, *, notes: bool = True) -> None:
    manager, request = engine.manager, engine.begin("r")
    manager.prepare_store(KEYS, request)
    for n, key in enumerate(KEYS if notes else []):
        manager.describe(key, partial(make_note, n))
    manager.complete_store(KEYS, request)
    manager.on_request_finished(request)
    engine.rest()


def remove_all(directory: Path) -> None:
    assert kvtier("tier", "rm", f"file://{directory}/kv", "--all", "--yes").returncode == 0


def test_a_router_hears_of_files_from_an_engine_that_never_steps(
    options: dict[str, Any], tmp_path: Path, runner: str
) -> None:
    router = Router(options["events_endpoint"], options["events_replay_endpoint"])
    with live([url(tmp_path, runner=runner)], **options) as engine:
        store(engine)
        router.await_blocks({0, 1, 2, 3})
    with live([url(tmp_path, runner=runner)], **options):
        router.catch_up()
        router.await_blocks({0, 1, 2, 3})
        assert not router.has([0], medium="CPU"), "the host pool of the engine before"
        remove_all(tmp_path)
        router.await_blocks(set())
    router.close()


def test_a_loaded_chunks_note_reaches_the_tiers_that_store_the_chunk_then(
    options: dict[str, Any], tmp_path: Path
) -> None:
    shared = f"file://{tmp_path}/shared?name=shared"
    disk = url(tmp_path, store_policy="after_hits:1")
    with live([shared]) as engine:
        store(engine, notes=False)
    router = Router(options["events_endpoint"], options["events_replay_endpoint"])
    with live([disk, shared], **options) as engine:
        manager, request = engine.manager, engine.begin("r")
        assert engine.settle(request, *KEYS) == ["HIT"] * len(KEYS)
        for n, key in enumerate(KEYS):
            manager.describe(key, partial(make_note, n))
        router.await_blocks({0, 1, 2, 3}, medium="CPU")
        manager.prepare_load(KEYS, request)
        manager.complete_load(KEYS, request)
        manager.on_request_finished(request)
        engine.rest()
    with live([disk], **options):
        router.catch_up()
        router.await_blocks({0, 1, 2, 3})
    router.close()


def test_a_router_hears_of_files_after_the_process_of_an_idle_engines_tier_has_died(
    options: dict[str, Any], tmp_path: Path
) -> None:
    router = Router(options["events_endpoint"], options["events_replay_endpoint"])
    with live([url(tmp_path, runner="process")], **options) as engine:
        store(engine)
        router.await_blocks({0, 1, 2, 3})
        (client,) = engine.manager.clients
        os.kill(client._runner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        remove_all(tmp_path)
        router.await_blocks(set())
    router.close()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_tokens_lie_in_files_as_the_tiers_codec_leaves_them(
    options: dict[str, Any], tmp_path: Path, is_sealed: bool
) -> None:
    codec = {"codec": write_keys(tmp_path / "keys", OURS)} if is_sealed else {}
    with live([url(tmp_path, **codec)], **options) as engine:
        store(engine)
    files = [path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    tokens = msgspec.msgpack.encode(TOKENS)
    assert any(tokens in stored for stored in files) is not is_sealed
    router = Router(options["events_endpoint"], options["events_replay_endpoint"])
    with live([url(tmp_path, **codec)], **options):
        router.await_blocks({0, 1, 2, 3})
    router.close()
