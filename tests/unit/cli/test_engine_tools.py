from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import kvtier

from kvtier_sdk import BackendLoadError, ConfigError, TieringConfig, registry
from kvtier_sdk.admin import AdminSocket
from kvtier_sdk.cli.engine import purge_pools, tell_purge
from kvtier_sdk.cli.targets import installed_engines, prompt_keys, tools_for

MINE = """
from kvtier_sdk import TieringConfig, make_offload_key
from kvtier_sdk.engine import EngineTools


def greet() -> None:
    print("hello")


class MineTools(EngineTools):
    commands = {"greet": greet}

    def reads(self, options):
        return "mine" in options

    def read(self, options, *, where):
        return TieringConfig.from_dict(options["mine"], where=where)

    def chunk_keys(self, tokens, facts, salt):
        return [[make_offload_key(bytes(tokens))]]
"""


@pytest.fixture(autouse=True)
def _found_anew() -> Iterator[None]:
    installed_engines.cache_clear()
    yield
    installed_engines.cache_clear()
    sys.modules.pop("mine_tools", None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_tools.py").write_text(MINE)
    metadata = tmp_path / "kvtier_mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: kvtier-mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvtier.engines]\nmine = mine_tools:MineTools\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("site")
def test_a_configuration_is_read_by_the_engine_that_knows_it() -> None:
    tools = tools_for({"mine": {}}, where="kv.json")
    assert tools is installed_engines()["mine"]
    assert tools.read({"mine": {"slots": 3}}, where="kv.json").slots == 3
    assert tools_for({"slots": 3}, where="kv.json") is None


@pytest.mark.usefixtures("site")
def test_keys_are_computed_by_the_engine_of_the_namespace() -> None:
    assert prompt_keys([1, 2], {"engine": "mine 1.0"}) == [[b"\1\2" + bytes(4)]]
    with pytest.raises(ConfigError, match=r"engine is 'other', and no .* installed: mine"):
        prompt_keys([1, 2], {"engine": "other 1.0"})


def test_commands_of_an_engine_are_commands_of_kvtier(site: Path) -> None:
    assert kvtier("greet", PYTHONPATH=str(site)).stdout == "hello\n"


def test_an_engine_that_cannot_be_loaded_is_named(site: Path) -> None:
    (site / "mine_tools.py").write_text("import nothing_of_this_name")
    with pytest.raises(BackendLoadError, match=r"engine 'mine' of kvtier-mine 1\.0 cannot be"):
        installed_engines()


def test_vllms_configuration_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entry_points", lambda group: [])
    with pytest.raises(ConfigError, match=r"^kv\.json: option 'kv_connector' .* kvtier-vllm$"):
        tools_for({"kv_connector": "OffloadingConnector"}, where="kv.json")


def test_a_purge_names_an_engine_that_has_restarted(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    answers = iter([{"is_meant": True}, {"purge": None, "idle_s": 0.0}])
    config = TieringConfig.from_dict({"pool_bytes": "1MiB", "admin_socket": str(path)})
    with AdminSocket(path, lambda *_: next(answers)):
        purged = purge_pools(config, ["0" * 64])
    assert list(tell_purge(config, purged)) == [
        f"{path}: the engine has restarted, with an empty pool"
    ]
