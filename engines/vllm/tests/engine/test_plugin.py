import importlib.metadata
import logging
import os
import sys
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvtier_sdk import ConfigError
    from kvtier_vllm import compat, plugin


def test_vllm_finds_it() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvtier")
    assert entry.load() is plugin.register


def test_this_release_is_one_that_was_tried() -> None:
    # A run of the tests on another release sets the variable.
    assert compat.release() == os.environ.get("KVTIER_TEST_VLLM_RELEASE", "0.32")
    assert compat.release() in compat.TRIED


def test_it_registers_one_type_however_often_it_runs() -> None:
    for _ in range(3):
        plugin.register()
    tier_class = SecondaryTierFactory.get_tier_class({"type": "kvtier"})
    assert tier_class.__name__ == "KVTierSecondaryTier"


def test_a_vllm_without_the_factory_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(SecondaryTierFactory, "_registry")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "'kvtier' could not be registered with vLLM (AttributeError" in caplog.text


def test_an_untried_release_gets_one_warning_that_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compat.warn_if_untried.cache_clear()
    monkeypatch.setattr(compat.vllm, "__version__", "9.9.1")
    with caplog.at_level(logging.WARNING):
        plugin.register()
        plugin.register()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "this is vLLM 9.9.1; kvtier was tested with 0.32 and 0.33"
    )
    compat.warn_if_untried.cache_clear()


def test_a_configuration_is_checked_once_and_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"spec_name": "kvtier"},
        ),
        model_config=SimpleNamespace(model="a-model"),
        parallel_config=SimpleNamespace(
            data_parallel_backend="mp", data_parallel_index=0, data_parallel_size_local=1
        ),
    )
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: made)
    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once
    with pytest.raises(ConfigError, match="'kv_connector_extra_config.spec_name' is 'kvtier'"):
        EngineArgs.create_engine_config(None)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", SimpleNamespace())
    with pytest.raises(SystemExit):
        EngineArgs.create_engine_config(None)
    made.parallel_config.data_parallel_size_local = 0
    assert EngineArgs.create_engine_config(None) is made
