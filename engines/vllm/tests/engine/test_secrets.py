import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import Server
from support.tier_process import tier_processes
from support.vllm_engine import BLOCK_TOKENS, OUR_MANAGER, OUR_TIERS, Way, make_prompt

PASSWORD = "hunter2 & /sons='1'"
VARIABLE = "KVTIER_TEST_PASSWORD"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "redis").start()
    server.ask("CONFIG", "SET", "requirepass", PASSWORD)
    server.client_options["password"] = PASSWORD
    yield server
    server.kill()


@pytest.mark.parametrize("way", [OUR_TIERS, OUR_MANAGER], ids=lambda way: way.name)
@pytest.mark.parametrize("place", ["file", "environment"])
def test_no_password_is_in_what_an_engine_writes(
    server: Server, tmp_path: Path, start_engine: Any, way: Way, place: str
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(PASSWORD)
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    if place == "environment":
        environment[VARIABLE] = PASSWORD
        given = f"${{{VARIABLE}}}"
        url = f"redis://:{given}@127.0.0.1:{server.port}"
    else:
        given = f"password_file={secret}"
        url = f"{server.url}?{given}"
    prompt = make_prompt(1, 3)
    offloading = way.offloading(url, runner="process")
    with start_engine(offloading, environment=environment) as engine:
        engine.generate(prompts=[prompt])
        engine.settle()
        (child,) = tier_processes(os.getpid()).values()
        log = engine.log()
    with start_engine(offloading, environment=environment) as engine:
        (output,) = engine.generate(prompts=[prompt])
        log += engine.log()
    assert output["cached"] == 3 * BLOCK_TOKENS
    assert "hunter2" not in log
    assert given in log
    assert "hunter2" not in child
    assert f"PATH={os.environ['PATH']}" in child
