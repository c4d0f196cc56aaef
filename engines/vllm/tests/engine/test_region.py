import itertools
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm_config import CHUNK_BYTES, joined_worker, make_config, opened_manager
    from vllm_platform import on_platform

    from kvtier_sdk import ConfigError
    from kvtier_vllm.region import JoinedRegion

SLOTS, WORKERS = 4, 2
MEMBERS = (None, *range(WORKERS))


def path_of(engine_id: str) -> Path:
    return Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")


@pytest.fixture
def engine_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    assert not path_of(name).exists()


def join(engine_id: str, worker: int | None) -> JoinedRegion:
    return JoinedRegion(
        engine_id,
        WORKERS,
        worker,
        num_chunks=SLOTS,
        rank=worker,
        kv_bytes_per_chunk=WORKERS * CHUNK_BYTES,
        cpu_page_size=CHUNK_BYTES,
    )


@pytest.mark.parametrize("order", [*itertools.permutations(MEMBERS)], ids=str)
def test_the_last_to_come_removes_the_name(
    engine_id: str, order: tuple[int | None, ...], caplog: pytest.LogCaptureFixture
) -> None:
    regions = {}
    for member in order:
        assert path_of(engine_id).exists() is bool(regions), "whoever is missing must find it"
        regions[member] = join(engine_id, member)
    assert not path_of(engine_id).exists()
    assert [region.absent() for region in regions.values()] == [[], [], []]
    part = regions[1].create_next_worker_view(CHUNK_BYTES)
    part.fill_(7)
    rows = np.asarray(regions[None].create_kv_memoryview())
    assert (rows[:, CHUNK_BYTES:] == 7).all()
    assert not rows[:, :CHUNK_BYTES].any()
    del part, rows
    for region in regions.values():
        region.cleanup()
    assert caplog.text == ""


def test_who_is_elsewhere_is_absent_and_the_name_goes_with_the_last(engine_id: str) -> None:
    first, scheduler = join(engine_id, 0), join(engine_id, None)
    assert scheduler.absent() == ["worker 1"]
    first.cleanup()
    assert path_of(engine_id).exists()
    assert scheduler.absent() == ["worker 0", "worker 1"]
    scheduler.cleanup()


def test_nobody_comes_twice(engine_id: str) -> None:
    first = join(engine_id, 0)
    with pytest.raises(ConfigError, match="worker 0 of this host pool is already there"):
        join(engine_id, 0)
    assert path_of(engine_id).exists()
    first.cleanup()


#: The platform and the spec of each way to use vLLM's shared memory.
WAYS = {
    "our manager": ("cuda", "KVTierOffloadingSpec"),
    "our worker": ("cpu", "KVTierCPUTieringSpec"),
}


@pytest.fixture(params=WAYS)
def config(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, engine_id: str
) -> OffloadingConfig:
    platform, spec = WAYS[request.param]
    on_platform(monkeypatch, platform, platform)
    extra: dict[str, Any] = {"spec_name": spec, "cpu_bytes_to_use": SLOTS * WORKERS * CHUNK_BYTES}
    return replace(make_config([], **extra), engine_id=engine_id)


def test_an_engine_that_has_started_has_no_name(config: OffloadingConfig) -> None:
    with joined_worker(config):
        assert path_of(config.engine_id).exists()
    with opened_manager(config):
        assert not path_of(config.engine_id).exists()


def test_an_engine_whose_worker_is_elsewhere_does_not_start(config: OffloadingConfig) -> None:
    config = replace(config, parallel=replace(config.parallel, world_size=2, tp_size=2))
    with joined_worker(config):
        spec = OffloadingSpecFactory.create_spec(config)
        # The refused scheduler has left the region, so a second attempt fails with the same error.
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"^worker 1 of this engine cannot be seen"):
                spec.get_manager()
