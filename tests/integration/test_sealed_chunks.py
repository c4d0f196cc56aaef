"""Engines share a store and use the same encryption keys, different keys, or none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.keys import NEXT, OURS, THEIRS, write_keys
from support.live import CHUNK_BYTES, Live, live
from support.runners import KEYS
from support.stores import Folder, Store

CHUNKS = KEYS[1:5]


def url(store: Store, runner: str, codec: str | None) -> str:
    mark = "&" if "?" in store.url else "?"
    return f"{store.url}{mark}runner={runner}" + (f"&codec={codec}" if codec else "")


def stored(engine: Live) -> None:
    request = engine.begin("storing")
    engine.store(request, *CHUNKS)
    engine.manager.on_request_finished(request)


def asked(engine: Live, name: str = "asking") -> set[str]:
    request = engine.begin(name)
    found = engine.settle(request, *CHUNKS)
    if set(found) == {"HIT"}:
        engine.load(request, *CHUNKS)
    engine.manager.on_request_finished(request)
    engine.rest()
    return set(found)


def failures(engine: Live) -> dict[str, int]:
    _, tier = engine.manager.stats
    return dict(tier.failures)


def test_engines_with_and_without_a_key(empty_store: Store, tmp_path: Path) -> None:
    runner = "process" if empty_store.name == "redis" else "thread"
    ours = write_keys(tmp_path / "ours.keys", OURS)
    with live([url(empty_store, runner, ours)]) as engine:
        stored(engine)
    assert empty_store.chunks() == len(CHUNKS)
    turning = write_keys(tmp_path / "turning.keys", NEXT, OURS)
    for codec in (ours, turning):
        with live([url(empty_store, runner, codec)]) as engine:
            assert asked(engine) == {"HIT"}
            assert failures(engine) == {}
    theirs = write_keys(tmp_path / "theirs.keys", THEIRS)
    with live([url(empty_store, runner, theirs)]) as engine:
        assert asked(engine) == {"MISS"}
        assert failures(engine) == {"load.auth": len(CHUNKS)}
    with live([url(empty_store, runner, None)]) as engine:
        assert asked(engine) == {"MISS"}
        assert failures(engine) == {}, "a sealed chunk has another namespace than a plain one"
    assert empty_store.chunks() == len(CHUNKS)
    with live([url(empty_store, runner, ours)]) as engine:
        assert asked(engine) == {"HIT"}, "none of them has touched the chunks"
    empty_store.damage()
    with live([url(empty_store, runner, ours)]) as engine:
        assert asked(engine) == {"MISS"}
        assert failures(engine) == {"load.auth": len(CHUNKS)}
    assert empty_store.chunks() == 0, "what no engine can open is deleted"


def test_two_engines_with_different_keys_come_to_rest(empty_store: Store, tmp_path: Path) -> None:
    """Each engine replaces the other engine's chunks once. After that, the chunks stay."""
    codecs = [write_keys(tmp_path / f"{key.hex()}.keys", key) for key in (OURS, THEIRS)]
    with (
        live([url(empty_store, "thread", codecs[0])], slots=8) as ours,
        live([url(empty_store, "thread", codecs[1])], slots=8) as theirs,
    ):
        served = []
        for turn in range(3):
            for engine in (ours, theirs):
                served.append(asked(engine, f"turn {turn}"))
                stored(engine)
                push_out(engine, turn)
        assert served == [{"MISS"}] * 4 + [{"HIT"}, {"MISS"}]
        count = len(CHUNKS)
        # Two loads of each chunk fail: one without a lookup, because the engine has stored this
        # chunk itself, and one after a lookup, which finds the other engine's chunk.
        assert failures(ours) == {"load.auth": 2 * count}
        assert failures(theirs) == {"load.auth": 4 * count, "store.auth": 2 * count}


def push_out(engine: Live, turn: int) -> None:
    request = engine.begin(f"filling {turn}")
    start = 10 + 8 * turn
    engine.store(request, *KEYS[start : start + 8])
    engine.manager.on_request_finished(request)
    engine.rest()


def test_nothing_of_a_chunk_can_be_read_in_the_store(tmp_path: Path) -> None:
    codec = write_keys(tmp_path / "ours.keys", OURS)
    store = Folder(tmp_path / "store", CHUNK_BYTES)
    with live([url(store, "thread", codec)]) as engine:
        stored(engine)
    files = [path.read_bytes() for path in (tmp_path / "store").rglob("*.kv")]
    assert len(files) == len(CHUNKS)
    assert not any(key[:8] * 2 in data for key in CHUNKS for data in files)


@pytest.mark.parametrize("fault", ["mode", "absent"])
def test_a_key_file_that_cannot_be_used_is_one_sentence(fault: str, tmp_path: Path) -> None:
    codec = write_keys(tmp_path / "chunk.keys", OURS)
    path = tmp_path / "chunk.keys"
    path.chmod(0o644)
    if fault == "absent":
        path.unlink()
    (tmp_path / "kv.toml").write_text(
        f'slots = 4\nchunk_bytes = 4096\n[[tiers]]\ntype = "memory"\ncodec = "{codec}"\n'
    )
    done = check(tmp_path / "kv.toml")
    assert done.returncode == 2
    says = {"mode": f"has mode 0644.*'chmod 600 {path}'", "absent": "No such file"}[fault]
    assert re.search(f"option 'tiers\\[0\\].codec'.*{says}", done.stdout)
    assert OURS.hex() not in done.stdout + done.stderr


def test_kvtier_check_tries_a_sealed_tier(tmp_path: Path) -> None:
    codec = write_keys(tmp_path / "chunk.keys", OURS)
    (tmp_path / "kv.toml").write_text(
        f'slots = 4\nchunk_bytes = 4096\n[[tiers]]\ntype = "file"\nroot = "{tmp_path}/kv"\n'
        f'codec = "{codec}"\n'
    )
    done = check(tmp_path / "kv.toml")
    assert done.returncode == 0, done.stderr
    assert codec in done.stdout
    assert OURS.hex() not in done.stdout + done.stderr


def check(config: Path) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable, "-m", "kvtier_sdk.cli", "check", config]
    return subprocess.run(command, capture_output=True, text=True, check=False)
