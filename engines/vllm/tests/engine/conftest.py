import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import OUR_MANAGER, OUR_TIERS, Engine, Interpreter, Way, make_model

StartEngine = Callable[..., Engine]

OFFLOADING = [OUR_TIERS, OUR_MANAGER]


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    model = make_model(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("engines")
    numbers = itertools.count()
    interpreters = [Interpreter(folder / "shared")]

    def start(
        offloading: dict[str, Any] | None = None, *, fresh: bool = False, **options: Any
    ) -> Engine:
        name = f"engine-{next(numbers)}"
        if fresh:
            interpreters.append(Interpreter(folder / name))
        interpreter = interpreters[-1 if fresh else 0]
        return Engine(interpreter, model, folder / f"{name}.log", offloading, **options)

    yield start
    for interpreter in interpreters:
        interpreter.close()


class Plain:
    def __init__(self, start_engine: StartEngine) -> None:
        self._start = start_engine
        self._engine: Engine | None = None

    def outputs(self, prompts: list[list[int]], **params: Any) -> list[dict[str, Any]]:
        if self._engine is None:
            self._engine = self._start()
        outputs = []
        for prompt in prompts:
            assert self._engine.reset_device()
            outputs += self._engine.generate(prompts=[prompt], **params)
        return outputs

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@pytest.fixture(scope="session")
def plain(start_engine: StartEngine) -> Iterator[Plain]:
    engine = Plain(start_engine)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=OFFLOADING, ids=lambda way: way.name)
def offloading_way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


@pytest.fixture
def another_hash(monkeypatch: pytest.MonkeyPatch) -> str:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    name = "sha256_cbor"
    seed = kv_cache_utils.get_none_hash_seed()
    value = kv_cache_utils.BlockHash(get_hash_fn_by_name(name)(seed))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", value, raising=False)
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")
