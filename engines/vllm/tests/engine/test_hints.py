from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    OUR_MANAGER,
    Engine,
    Interpreter,
    make_model,
    make_prompt,
)

CHUNKS = 3
SLOTS = 16
#: The source of a policy that writes to a file why each answer ended.
LISTENER = """
from kvtier_sdk import EvictionPolicy


class Listener(EvictionPolicy):
    def __init__(self):
        self.keys = {{}}

    def on_insert(self, keys, request):
        self.keys |= dict.fromkeys(keys)

    def on_access(self, keys, request):
        pass

    def on_remove(self, key):
        del self.keys[key]

    def choose_victims(self, count, is_evictable):
        return list(filter(is_evictable, self.keys))[:count]

    def on_request_finished(self, request, stop):
        with open({path!r}, "a") as file:
            print(stop, file=file)
"""


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heard") / "stops"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, heard: Path) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hints")
    site = heard.parent / "site"
    metadata = site / "listener-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: listener\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvtier.policies]\nlistener = listener:Listener\n")
    (site / "listener.py").write_text(LISTENER.format(path=str(heard)))
    model = make_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=":")
        interpreter = Interpreter(folder / "interpreter")
    offloading = OUR_MANAGER.offloading("memory:?capacity=1MiB", host_bytes=SLOTS * CHUNK_BYTES)
    assert offloading is not None
    offloading |= {"eviction_policy": "listener", "secondary_tiers": []}
    with Engine(interpreter, model, folder / "engine.log", offloading) as engine:
        yield engine
    interpreter.close()


def flood(engine: Engine) -> None:
    for seed in range(2 * SLOTS // CHUNKS):
        engine.generate(prompts=[make_prompt(100 + seed, CHUNKS)])
    engine.settle()


def served(engine: Engine, prompt: list[int]) -> int:
    assert engine.reset_device()
    (output,) = engine.generate(prompts=[prompt])
    engine.settle()
    return int(output["cached"])


def ask(engine: Engine, prompt: list[int], **params: Any) -> list[int]:
    engine.add(prompts=[prompt], **params)
    (output,) = engine.finish()
    engine.settle()
    return list(output["tokens"])


def test_kv_hints_pin_a_prompt(engine: Engine) -> None:
    pinned, other = make_prompt(1, CHUNKS), make_prompt(2, CHUNKS)
    ask(engine, pinned, hints={"pin": {"session": "chat 7", "for": "5m"}})
    ask(engine, other)
    flood(engine)
    assert served(engine, other) == 0
    assert served(engine, pinned) == CHUNKS * BLOCK_TOKENS
    assert f"host: pin for session 'chat 7': accepted, {CHUNKS} chunks, 300 s" in engine.log()
    ask(engine, pinned, hints={"end": {"session": "chat 7"}})
    flood(engine)
    assert served(engine, pinned) == 0


def test_the_policy_hears_why_answers_end(engine: Engine, heard: Path) -> None:
    prompt = make_prompt(3, 1)
    engine.settle()
    heard.write_text("")
    _, second, *_ = ask(engine, prompt)
    ask(engine, prompt, stop_token_ids=[second])
    engine.add(prompts=[prompt])
    engine.abort(index=0)
    engine.settle()
    # Ignore ``length``, because the prompts that ``settle`` sends end for this reason.
    stops = heard.read_text().splitlines()
    assert [stop for stop in stops if stop != "length"] == [f"stop {second}", "abort"]
    assert "length" in stops
    assert not any(engine.leftovers().values()), engine.leftovers()
