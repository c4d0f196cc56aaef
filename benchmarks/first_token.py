"""Compare vLLM's file tier and kvtier's: time to first token, and answers from damaged files.

Usage: .venv-vllm/bin/python benchmarks/first_token.py [--tokens N] [--rounds N] [--layers N]

Real engines on the CPU, one for each way to offload, serve the same random prompts in turns. Each
round serves a new prompt twice. The first time, the engine computes and stores the prompt's chunks.
Then the device cache and the host pool are emptied. The second time, the chunks come from the
files, without the page cache if the disk allows it. Both answers must be equal. The benchmark also
reads the files without an engine, to measure the disk's share of the time. At the end, one byte of
each file is inverted, and a stored prompt is served from the files.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from results import Series
from runner import Benchmark, Sample, must_be_equal, positive
from support.vllm_engine import (
    BLOCK_TOKENS,
    OUR_MANAGER,
    OUR_TIERS,
    Engine,
    Interpreter,
    make_model,
    make_prompt,
    same,
)

from kvtier_file.directories import open_file

#: A model whose keys and values take 4 KiB per layer and token, in float32.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
VLLM, OURS_A, OURS_B = "vLLM's file tier", "kvtier (a), our tier", "kvtier (b), our manager"
_POOL_BYTES = 2**30
_MOST_FILE_BYTES = 2**25


class Side:
    def __init__(self, engine: Engine, root: Path, chunks: int, chunk_bytes: int) -> None:
        self._engine = engine
        self._root = root
        self._chunks = chunks
        self._chunk_bytes = chunk_bytes
        self._read: set[Path] = set()

    def serve(self, number: int) -> Iterator[Sample]:
        prompt = make_prompt(number, self._chunks)
        computed = self._serve(prompt)
        self._forget()
        loaded = self._serve(prompt)
        must_be_equal(same([computed], [loaded]) and loaded["cached"] > 0)
        for case, served in (("computed", computed), ("from files", loaded)):
            yield case, "time to first token", "ms", 1e3 * served["first_token_s"]
        files = self._files()
        yield "disk alone", "time to first token", "ms", 1e3 * read_s(files - self._read)
        self._read = files

    def serve_damaged(self, number: int) -> Iterator[Sample]:
        prompt = make_prompt(number, self._chunks)
        before = self._serve(prompt)
        self._forget()
        for path in self._files():
            flip_byte(path)
        after = self._serve(prompt)
        yield "damaged files", "tokens from them", "tokens", after["cached"]
        yield "damaged files", "same answer", "", float(same([before], [after]))

    def _files(self) -> set[Path]:
        files = filter(Path.is_file, self._root.rglob("*"))
        return {path for path in files if path.stat().st_size >= self._chunk_bytes}

    def _serve(self, prompt: list[int]) -> dict[str, Any]:
        (output,) = self._engine.generate(prompts=[prompt])
        self._engine.settle()
        return dict(output)

    def _forget(self) -> None:
        self._engine.reset_all()
        self._engine.settle()


def flip_byte(path: Path) -> None:
    with path.open("r+b") as file:
        middle = path.stat().st_size // 8 * 4 + 3  # a float32's sign and exponent
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0xFF]))


def read_s(paths: Iterable[Path]) -> float:
    """Read the files in four threads, bypassing the page cache; return the seconds spent."""
    rest = iter(paths)

    def read(buffer: mmap.mmap) -> None:
        for path in rest:
            fd = open_file(str(path), os.O_RDONLY, 0, direct=True)  # an absolute path
            os.preadv(fd, [buffer], 0)
            os.close(fd)

    buffers = [mmap.mmap(-1, _MOST_FILE_BYTES) for _ in range(4)]
    with ThreadPoolExecutor(len(buffers)) as threads:
        start_s = time.perf_counter()
        list(threads.map(read, buffers))
        return time.perf_counter() - start_s


def offloading(name: str, root: Path) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` for vLLM."""
    way = OUR_TIERS if name in (OURS_A, VLLM) else OUR_MANAGER
    ours = way.offloading(f"file://{root}", host_bytes=_POOL_BYTES)
    if name == VLLM:
        # Use kvtier's spec, because vLLM's own spec does not run on a CPU. The two specs differ
        # only in the copies to the device.
        return {**ours, "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
    return ours


def main() -> None:
    bench = Benchmark(__doc__, rounds=9)
    bench.option("--tokens", type=positive, default=2048, help="of a prompt (%(default)s)")
    bench.option("--layers", type=positive, default=16, help="of the model (%(default)s)")
    bench.option("--threads", type=positive, default=2, help="of an engine (%(default)s)")
    options = bench.parse()
    chunks, chunk_bytes = options.tokens // BLOCK_TOKENS, BLOCK_TOKENS * options.layers * 4096
    with bench.folder() as folder, ExitStack() as stack:
        model = make_model(folder / "model", num_hidden_layers=options.layers, **SHAPE)
        interpreter = Interpreter(folder / "interpreter", threads=options.threads)
        stack.callback(interpreter.close)
        sides = {}
        # With these limits, the engine computes a prompt in one step, as on a GPU.
        lengths = dict.fromkeys(("max_model_len", "max_num_batched_tokens"), options.tokens + 256)
        for number, name in enumerate((OURS_B, OURS_A, VLLM)):
            root = folder / f"kv-{number}"
            root.mkdir(mode=0o700)
            log = folder / f"engine-{number}.log"
            engine = Engine(interpreter, model, log, offloading(name, root), **lengths)
            stack.enter_context(engine)
            sides[name] = Side(engine, root, chunks, chunk_bytes)
            print(f"started: {name}", file=sys.stderr, flush=True)
        group = f"{options.tokens:,} tokens"
        bench.measure(group, {name: side.serve for name, side in sides.items()})
        bench.add(
            [
                Series(group, case, name, quantity, unit, [value])
                for name, side in sides.items()
                for case, quantity, unit, value in side.serve_damaged(options.rounds)
            ]
        )
    bench.finish()


if __name__ == "__main__":
    main()
