"""Routers hear of files: of an engine that is idle or new, and whatever another process does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from support.command import kvtier
from support.keys import OURS, write_keys
from support.router import Router, free_endpoints

from kvtier_sdk import Namespace, RequestContext, TieringConfig, make_offload_key
from kvtier_sdk.engine import ChunkNote, TieringManager, open_manager, open_pool

CHUNK_BYTES = 8192
REQUEST = RequestContext("r")
KEYS = [make_offload_key(n.to_bytes(32, "big")) for n in range(1, 5)]
#: Tokens that would be easy to find in a file.
TOKENS = [0x7A3B1F] * 16


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    events, replay = free_endpoints()
    tier = {"url": f"file://{tmp_path}/kv", "scan_interval": "200ms"}
    return {
        "slots": 8,
        "chunk_bytes": CHUNK_BYTES,
        "events_endpoint": events,
        "events_replay_endpoint": replay,
        "events_tokens": True,
        "tiers": [tier],
    }


@contextmanager
def engine(options: dict[str, object], **tier: str) -> Iterator[TieringManager]:
    tiers = [{**options["tiers"][0], **tier}]  # type: ignore[index]
    config = TieringConfig.from_dict({**options, "tiers": tiers})
    with (
        open_pool(config) as pool,
        open_manager(pool, config, Namespace({"model": "m"})) as manager,
    ):
        yield manager


def store(manager: TieringManager) -> None:
    manager.on_new_request(REQUEST)
    manager.prepare_store(KEYS, REQUEST)
    for n, key in enumerate(KEYS):
        manager.describe(key, ChunkNote([n], n - 1 if n else None, TOKENS, 16))
    manager.complete_store(KEYS, REQUEST)
    manager.on_request_finished(REQUEST)
    while manager.has_pending_work():
        manager.on_schedule_end()
        time.sleep(0.01)


def remove_all(directory: Path) -> None:
    assert kvtier("tier", "rm", f"file://{directory}/kv", "--all", "--yes").returncode == 0


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_router_hears_of_files_from_an_engine_that_never_steps(
    options: dict[str, object], tmp_path: Path, runner: str
) -> None:
    router = Router(str(options["events_endpoint"]), str(options["events_replay_endpoint"]))
    with engine(options, runner=runner) as manager:
        store(manager)
        router.await_blocks({0, 1, 2, 3})
    with engine(options, runner=runner):
        router.catch_up()
        router.await_blocks({0, 1, 2, 3})
        assert not router.has([0], medium="CPU"), "the host pool of the engine before"
        remove_all(tmp_path)
        router.await_blocks(set())
    router.close()


def test_a_router_hears_of_files_after_the_process_of_an_idle_engines_tier_has_died(
    options: dict[str, object], tmp_path: Path
) -> None:
    router = Router(str(options["events_endpoint"]), str(options["events_replay_endpoint"]))
    with engine(options, runner="process") as manager:
        store(manager)
        router.await_blocks({0, 1, 2, 3})
        (client,) = manager.clients
        os.kill(client._runner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        remove_all(tmp_path)
        router.await_blocks(set())
    router.close()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_tokens_lie_in_files_as_the_tiers_codec_leaves_them(
    options: dict[str, object], tmp_path: Path, is_sealed: bool
) -> None:
    codec = {"codec": write_keys(tmp_path / "keys", OURS)} if is_sealed else {}
    with engine(options, **codec) as manager:
        store(manager)
    files = [path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    token = TOKENS[0].to_bytes(3, "big")
    assert any(token in stored for stored in files) is not is_sealed
    router = Router(str(options["events_endpoint"]), str(options["events_replay_endpoint"]))
    with engine(options, **codec):
        router.await_blocks({0, 1, 2, 3})
    router.close()
