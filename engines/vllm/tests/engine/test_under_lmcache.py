from pathlib import Path
from typing import Any

import pytest
from support.lmcache_server import LMCacheServer, wait_until
from support.vllm_engine import Engine, make_prompt, same

from .conftest import StartEngine

#: Each prompt has 1,029 tokens, enough for four of LMCache's chunks of 256 tokens.
PROMPTS = [make_prompt(seed, 8) for seed in range(2)]
TOKENS = 1024


def files(folder: Path) -> list[Path]:
    found = folder.rglob("*") if folder.exists() else ()
    return [path for path in found if path.is_file() and path.stat().st_size >= 2**21]


def forget(engine: Engine, server: LMCacheServer) -> None:
    # Run another step, because LMCache frees stored blocks only then.
    engine.settle()
    assert engine.reset_device()
    server.forget()


@pytest.mark.parametrize("store", ["kvtier", "fs_native"])
def test_an_engine_gets_its_answers_from_the_tier_and_computes_what_is_damaged(
    store: str, tmp_path: Path, start_engine: StartEngine
) -> None:
    adapter: dict[str, Any] | None = None
    if store == "fs_native":
        adapter = {"type": "fs_native", "base_path": f"{tmp_path}/kv"}
    with LMCacheServer(tmp_path, adapter) as server:
        options = {"lmcache.mp.port": server.port, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}
        with start_engine(options, connector="LMCacheMPConnector") as engine:
            computed = engine.generate(prompts=PROMPTS)
            assert [output["cached"] for output in computed] == [0, 0]
            wait_until(lambda: len(files(tmp_path / "kv")) == 8, "all chunks to be in files")
            forget(engine, server)
            loaded = engine.generate(prompts=PROMPTS)
            assert [output["cached"] for output in loaded] == [TOKENS, TOKENS]
            assert same(loaded, computed)
            for path in files(tmp_path / "kv"):
                damage(path)
            forget(engine, server)
            again = engine.generate(prompts=PROMPTS)
            if store == "kvtier":
                assert [output["cached"] for output in again] == [0, 0]
                assert same(again, computed)
            else:
                assert [output["cached"] for output in again] == [TOKENS, TOKENS]
                assert not same(again, computed)
    assert "runs in threads" not in server.log()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    quarter = len(content) // 16 * 4
    # Flip signs: the sign bit is in the last byte of a little-endian float32.
    for place in range(quarter + 3, 3 * quarter, 4):
        content[place] ^= 0x80
    path.write_bytes(content)
