"""Engines share a store and use the same encryption keys, different keys, or none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.command import kvtier
from support.keys import NEXT, OURS, THEIRS, write_keys
from support.live import Live, live
from support.runners import KEYS
from support.stores import Store

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
    runner = "thread"
    ours = write_keys(tmp_path / "ours.keys", OURS)
    with live([url(empty_store, "process", ours)]) as engine:
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
    done = kvtier("check", tmp_path / "kv.toml")
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
    done = kvtier("check", tmp_path / "kv.toml")
    assert done.returncode == 0, done.stderr
    assert codec in done.stdout
    assert OURS.hex() not in done.stdout + done.stderr
