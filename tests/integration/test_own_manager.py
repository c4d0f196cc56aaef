from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

from kvtier_sdk import HostPool, Namespace, PoolLayout, RequestContext, TierSpec, make_offload_key
from kvtier_sdk.engine import open_tier
from kvtier_sdk.runner import ProcessRunner

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_manager.py"


def test_it_survives_its_tier_being_killed(tmp_path: Path) -> None:
    spec_of_example = importlib.util.spec_from_file_location("own_manager", EXAMPLE)
    assert spec_of_example is not None
    assert spec_of_example.loader is not None
    example = importlib.util.module_from_spec(spec_of_example)
    spec_of_example.loader.exec_module(example)
    chunks = {make_offload_key(bytes([n]) * 32): bytes([n]) * example.CHUNK_BYTES for n in range(8)}
    keys, request = list(chunks), RequestContext("r")
    pool = HostPool.create(PoolLayout(example.SLOTS, example.CHUNK_BYTES))
    spec = TierSpec.from_url(f"file://{tmp_path}/kv", runner="process", lookup_deadline="30s")
    table = example.SlotTable()
    with open_tier(spec, pool, Namespace({"model": "m"}), table) as tier:
        engine = example.Engine(tier, pool, table)
        for key in keys:
            engine.write(key, chunks[key], request)
        engine.step_until(lambda: not table.busy)
        for key in keys:
            engine.evict(key)
        assert isinstance(tier._runner, ProcessRunner)
        assert tier._runner.pid is not None
        os.kill(tier._runner.pid, signal.SIGKILL)
        assert engine.fetch(keys, request) == [], "a miss at once, and no error"
        assert sorted(table.free) == list(range(example.SLOTS))
        engine.step_until(lambda: tier.stats.restarts == 1)
        assert engine.fetch(keys, request) == keys, "what was stored is there again"
        assert all(pool.view(table.chunks[key]) == chunks[key] for key in keys)
    pool.close()
