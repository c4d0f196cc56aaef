from __future__ import annotations

from pathlib import Path

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
