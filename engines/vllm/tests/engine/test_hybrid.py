"""A model with eight KV-cache groups: one of full attention, seven of sliding windows."""

from pathlib import Path
from typing import Any

from support.vllm_engine import BLOCK_TOKENS, CHUNK_BYTES, Way, make_prompt, same

GROUPS, LAYERS, CHUNKS, WINDOW_CHUNKS = 8, 16, 8, 2
HYBRID = {
    "num_hidden_layers": LAYERS,
    "sliding_window": WINDOW_CHUNKS * BLOCK_TOKENS,
    "layer_types": (["sliding_attention"] * (GROUPS - 1) + ["full_attention"]) * 2,
}
PROMPT = make_prompt(1, CHUNKS)
#: Chunks of all groups. A group with a sliding window needs only the end of a prefix.
STORED = CHUNKS + (GROUPS - 1) * WINDOW_CHUNKS
#: ``CHUNK_BYTES`` counts four layers, but a group has two.
NEEDED_BYTES = STORED * CHUNK_BYTES // 2


def test_slots_and_objects_have_the_size_of_one_groups_chunk(
    offloading_way: Way, start_engine: Any, tmp_path: Path
) -> None:
    url, room_bytes = f"file://{tmp_path}", int(1.1 * NEEDED_BYTES)
    small = offloading_way.offloading(url, host_bytes=room_bytes)
    with start_engine(small, hf_overrides=HYBRID) as first:
        computed = first.generate(prompts=[PROMPT])
        first.settle()
        assert first.primary_chunks() == STORED
        assert first.reset_device()
        from_pool = first.generate(prompts=[PROMPT])
        assert first.stats()["file"]["loaded_chunks"] == 0
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.kv")]
    assert len(sizes) == STORED
    assert sum(sizes) <= room_bytes
    with start_engine(offloading_way.offloading(url), hf_overrides=HYBRID) as second:
        from_tier = second.generate(prompts=[PROMPT])
        second.settle()
        assert second.stats()["file"]["loaded_chunks"] == STORED
        assert not any(second.leftovers().values())
    served = CHUNKS * BLOCK_TOKENS
    assert [outputs[0]["cached"] for outputs in (computed, from_pool, from_tier)] == [
        0,
        served,
        served,
    ]
    assert same(from_pool, computed)
    assert same(from_tier, computed)
