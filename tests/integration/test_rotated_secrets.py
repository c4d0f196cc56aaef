from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from support.live import Live, live
from support.runners import KEYS
from support.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

QUICK = {"probe_interval": "200ms", "max_probe_interval": "200ms"}


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO)
    yield caplog
    assert "hunter2" not in caplog.text
    assert SECRET_ACCESS_KEY not in caplog.text


def fail(engine: Live) -> None:
    _, tier = engine.manager.stats
    request = engine.begin("in vain")
    for key in KEYS[40:]:
        engine.store(request, key)
        if tier.stores_open:
            break
    assert set(tier.failures) == {"store.auth"}
    assert tier.stores_open
    engine.manager.on_request_finished(request)


def recover(engine: Live, *keys: bytes) -> None:
    _, tier = engine.manager.stats
    for _ in range(3000):
        engine.step()
        if not (tier.stores_open or tier.reads_open):
            break
    assert (tier.stores_open, tier.reads_open) == (0, 0)
    request = engine.begin("again")
    for start in range(0, len(keys), 8):
        some = keys[start : start + 8]
        assert engine.settle(request, *some) == ["HIT"] * 8
        engine.load(request, *some)
    engine.there_and_back(request, *KEYS[32:40])


def test_the_keys_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    aws = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(aws))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    def write(key: str) -> None:
        aws.write_text(
            f"[default]\naws_access_key_id={ACCESS_KEY_ID}\naws_secret_access_key={key}\n"
        )

    with S3Server(tmp_path / "s3") as server:
        write(SECRET_ACCESS_KEY)
        options = {"endpoint": server.endpoint, "region": REGION, **QUICK}
        with live([f"s3://kv/chunks?{urlencode(options)}"], slots=16) as engine:
            engine.there_and_back(engine.begin("one"), *KEYS[:16])
            server.kill()
            server.secret_access_key = "hunter2-hunter2"
            server.start()
            fail(engine)
            write("hunter2-hunter2")
            recover(engine, *KEYS[:16])
    assert log.text.count("the server refused; other credentials were found") == 1
