"""SGLang's own tests of its Mooncake storage, run with kvtier's storage instead.

SGLang's wheel contains the tests. Tests of other backends do not run here, because some need a
service. ``test_single_operation`` does not run either, because only Mooncake's storage
accepts addresses instead of tensors.
"""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import support.sglang_platform  # noqa: F401
import torch

from kvtier_sglang import KVTierHiCacheStorage

PACKAGE = "sglang.srt.mem_cache.storage.mooncake_store"


@pytest.fixture
def own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    made = []

    def make(config: Any) -> KVTierHiCacheStorage:
        tier = {"url": f"file://{tmp_path}/kv?min_free=0"}
        made.append(KVTierHiCacheStorage(replace(config, extra_config={"tier": tier})))
        return made[-1]

    replacement = ModuleType(f"{PACKAGE}.mooncake_store")
    replacement.MooncakeStore = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, replacement.__name__, replacement)
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.test_mooncake_store", raising=False)
    module = importlib.import_module(f"{PACKAGE}.test_mooncake_store")
    make_pool = module.create_mock_host_kv_cache

    def make_whole_pool(*args: Any, **options: Any) -> tuple[Any, torch.Tensor]:
        pool, buffer = make_pool(*args, **options)
        length = pool.entries_per_page * pool.page_elements

        def page(index: int) -> torch.Tensor:
            return buffer[index * length : (index + 1) * length]

        pool.dtype = buffer.dtype
        pool.get_dummy_flat_data_page = lambda: torch.zeros(length, dtype=buffer.dtype)
        pool.get_data_page = lambda index, flat=True: page(index)
        pool.set_from_flat_data_page = lambda index, data: page(index).copy_(data)
        return pool, buffer

    monkeypatch.setattr(module, "create_mock_host_kv_cache", make_whole_pool)
    yield module
    for storage in made:
        storage.close()


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (1, 4), (3, 8)])
@pytest.mark.parametrize("is_mla", [False, True])
def test_mooncake_batches(own_tests: ModuleType, is_mla: bool, tp_rank: int, tp_size: int) -> None:
    config = own_tests.make_hicache_storage_config(
        is_mla_model=is_mla, tp_rank=tp_rank, tp_size=tp_size
    )
    own_tests.test_batch_operation(config)
