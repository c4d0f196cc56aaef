from pathlib import Path
from typing import Any

from support.vllm_engine import BLOCK_TOKENS, CHUNK_BYTES, Way, make_prompt, same

PROMPT = make_prompt(1, chunks=3)


def test_an_engine_reads_what_another_has_compressed(
    offloading_way: Way, start_engine: Any, folder: Path
) -> None:
    url = f"file://{folder}/kv"
    compressing = offloading_way.offloading(url, compress="always")
    with start_engine(compressing, dtype="bfloat16") as first:
        first.generate(prompts=[PROMPT])
        first.settle()
        assert first.reset_device()
        loaded = first.generate(prompts=[PROMPT])
    sizes = [file.stat().st_size for file in Path(folder).rglob("*.kv")]
    assert len(sizes) == 3
    # Halve ``CHUNK_BYTES``, because it counts four bytes for an element, but a bfloat16 has two.
    assert max(sizes) < 0.8 * CHUNK_BYTES / 2
    with start_engine(offloading_way.offloading(url), dtype="bfloat16") as second:
        outputs = second.generate(prompts=[PROMPT])
    assert [output["cached"] for output in outputs] == [3 * BLOCK_TOKENS]
    assert same(outputs, loaded)
