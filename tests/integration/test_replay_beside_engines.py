from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from support.command import kvtier
from support.filled import CHUNK_BYTES, contents, fill, keys_from
from support.played import report_of as replay
from support.stores import Folder, RedisStore, Store

from kvtier_sdk import Namespace

VLLM = Namespace({"engine": "vllm 0.33", "model": "llama"})
ENGINES_KEYS = keys_from(0, 20)


# Leave S3 out, because its limit is the option ``capacity``, which ``Folder`` already tests.
@pytest.mark.parametrize(
    "empty_store", [Folder, RedisStore], ids=lambda kind: kind.name, indirect=True
)
def test_others_chunks_are_not_evicted(empty_store: Store) -> None:
    store = empty_store
    limited = f"{store.url}&capacity=200KiB"
    if isinstance(store, RedisStore):
        limited = store.url
        with redis.Redis.from_url(store.url.partition("?")[0]) as client:
            client.config_set("maxmemory", "64mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
    fill(store.url, VLLM, ENGINES_KEYS)
    done = kvtier("replay", "--requests", "40", "--tier", limited)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    for part in (VLLM.for_chunks(CHUNK_BYTES).fingerprint[:12], "(llama)", "--evict-others"):
        assert part in done.stderr
    assert "of its own" in done.stderr
    assert store.chunks() == 20
    report = replay("--requests", "40", "--tier", limited, "--evict-others")
    assert report["tiers"][1]["bytes_stored"] > 0


def test_a_store_without_a_limit_is_shared(tmp_path: Path) -> None:
    store = Folder(tmp_path / "store", CHUNK_BYTES)
    fill(store.url, VLLM, ENGINES_KEYS)
    replay("--requests", "40", "--tier", store.url)
    assert None not in contents(store.url, VLLM, ENGINES_KEYS)


def test_a_replay_evicts_what_replays_and_checks_have_left(tmp_path: Path) -> None:
    config = tmp_path / "kv.toml"
    config.write_text(f'slots = 40\ntiers = ["file://{tmp_path}/kv?capacity=1MiB"]')
    assert kvtier("check", str(config)).returncode == 0
    for chunk_bytes in ("4KiB", "8KiB"):
        done = kvtier(
            *("replay", "--json", "--requests", "100", "--chunk-bytes", chunk_bytes),
            *("--config", str(config)),
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tiers"][1]["evicted_blocks"] > 0
