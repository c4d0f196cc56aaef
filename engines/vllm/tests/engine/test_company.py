from pathlib import Path
from typing import Any

from support.stores import Folder
from support.vllm_engine import BLOCK_TOKENS, CHUNK_BYTES, OUR_TIERS, Way, make_prompt, same

CHUNKS = (3, 2, 4)
PROMPTS = [make_prompt(seed, chunks) for seed, chunks in enumerate(CHUNKS)]
FULL = [chunks * BLOCK_TOKENS for chunks in CHUNKS]


def test_beside_another_connector(
    offloading_way: Way, start_engine: Any, plain: Any, tmp_path: Path
) -> None:
    store = Folder(tmp_path / "kv", CHUNK_BYTES)

    def start(name: str) -> Any:
        others = {"shared_storage_path": str(tmp_path / name)}
        connectors = {
            "OffloadingConnector": offloading_way.offloading(store.url),
            "ExampleConnector": others,
        }
        extra = {
            "connectors": [
                {"kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": options}
                for kind, options in connectors.items()
            ]
        }
        return start_engine(extra, connector="MultiConnector", disable_hybrid_kv_cache_manager=True)

    for name, cached in {"first": [0, 0, 0], "second": FULL}.items():
        # Only kvtier finds chunks in the second round, because the other connector's folder is new.
        with start(name) as engine:
            outputs = engine.generate(prompts=PROMPTS)
            engine.settle()
        assert same(outputs, plain.outputs(PROMPTS))
        assert [output["cached"] for output in outputs] == cached
        assert store.chunks() == sum(CHUNKS)
        assert any((tmp_path / name).iterdir())


def test_the_eviction_policy_alone(start_engine: Any, plain: Any) -> None:
    offloading = {
        "spec_name": OUR_TIERS.spec,
        "spec_module_path": "kvtier_vllm",
        "cpu_bytes_to_use": (CHUNKS[0] + CHUNKS[1]) * CHUNK_BYTES,
        "eviction_policy": "KVTierCachePolicy",
        "cache_policy_module_path": "kvtier_vllm",
    }
    with start_engine(offloading) as engine:
        # Each round evicts chunks, because the host memory cannot hold all prompts' chunks.
        for _ in range(2):
            for prompt in PROMPTS:
                assert same(engine.generate(prompts=[prompt]), plain.outputs([prompt]))
                engine.settle()
        assert engine.reset_device()
        (output,) = engine.generate(prompts=PROMPTS[-1:])
        assert output["cached"] == FULL[-1]
        assert same([output], plain.outputs(PROMPTS[-1:]))
        engine.settle()
        assert not any(engine.leftovers().values()), engine.leftovers()
