"""Compare vLLM's file tier and kvtier's by time to first token and by answers from damaged files.

Usage: .venv-vllm/bin/python benchmarks/first_token.py [--tokens N] [--rounds N] [--layers N]

Real engines on the CPU, one for each way to offload, serve the same random prompts in turns. Each
round serves a new prompt twice. The first time, the engine computes and stores the prompt's chunks.
Then the device cache and the host pool are emptied. The second time, the chunks come from the
files, without the page cache if the disk allows it. Both answers must be equal. Then the files are
only read, for the disk's share of the time. At the end, one byte of each file is inverted, and a
stored prompt is served from the files.

With --compress, kvtier's tiers alone are compared, plain and compressed, for a model in bfloat16:
files, and an S3 server on the loopback. Nothing is damaged then.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from results import Series
from runner import Benchmark, Sample, must_be_equal, positive
from support.s3_server import S3Server
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

from kvtier_file.file_io import open_direct

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
#: The sides with --compress, and the option's value for each.
_COMPRESSED = {
    "files, auto": "auto",
    "files, plain": "never",
    "files, compressed": "always",
    "S3, plain": "never",
    "S3, compressed": "always",
}
_POOL_BYTES = 2**30
_MOST_FILE_BYTES = 2**25


class Side:
    def __init__(
        self, engine: Engine, root: Path, chunks: int, chunk_bytes: int, *, is_rounded: bool
    ) -> None:
        self._engine = engine
        self._is_rounded = is_rounded
        self._root = root
        self._chunks = chunks
        self._chunk_bytes = chunk_bytes
        self._read: set[Path] = set()

    def serve(self, number: int) -> Iterator[Sample]:
        prompt = make_prompt(number, self._chunks)
        computed = self._serve(prompt)
        self._forget()
        loaded = self._serve(prompt)
        # In bfloat16 a loaded prefix changes log-probabilities by a rounding, so compare tokens.
        is_same = computed["tokens"] == loaded["tokens"]
        if not self._is_rounded:
            is_same = same([computed], [loaded])
        must_be_equal(is_same and loaded["cached"] > 0)
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
    """Return the seconds in which four threads read the files, without the page cache."""
    rest = iter(paths)

    def read(buffer: mmap.mmap) -> None:
        for path in rest:
            fd = open_direct(str(path), os.O_RDONLY, 0)  # an absolute path
            os.preadv(fd, [buffer], 0)
            os.close(fd)

    buffers = [mmap.mmap(-1, _MOST_FILE_BYTES) for _ in range(4)]
    with ThreadPoolExecutor(len(buffers)) as threads:
        start_s = time.perf_counter()
        list(threads.map(read, buffers))
        return time.perf_counter() - start_s


def offloading(name: str, url: str, root: Path) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` for vLLM."""
    way = OUR_TIERS if name in (OURS_A, VLLM) else OUR_MANAGER
    ours = way.offloading(url, host_bytes=_POOL_BYTES) or {}
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
    bench.option("--compress", action="store_true", help="plain beside compressed chunks")
    options = bench.parse()
    directory = tempfile.TemporaryDirectory(prefix="kvtier-first-", dir=options.root)
    with directory as place, ExitStack() as stack:
        folder = Path(place)
        model = make_model(folder / "model", num_hidden_layers=options.layers, **SHAPE)
        interpreter = Interpreter(folder / "interpreter", threads=options.threads)
        stack.callback(interpreter.close)
        sides = {}
        # A compressed chunk of bfloat16 is longer than a quarter of one of float32.
        token_bytes = options.layers * (1024 if options.compress else 4096)
        chunks, chunk_bytes = options.tokens // BLOCK_TOKENS, BLOCK_TOKENS * token_bytes
        names, more = (OURS_B, OURS_A, VLLM), {}
        if options.compress:
            server = stack.enter_context(S3Server(folder))
            names, more = tuple(_COMPRESSED), {"dtype": "bfloat16"}
        # With these limits, the engine computes a prompt in one step, as on a GPU.
        lengths = dict.fromkeys(("max_model_len", "max_num_batched_tokens"), options.tokens + 256)
        for number, name in enumerate(names):
            root = folder / f"kv-{number}"
            root.mkdir(mode=0o700)
            log = folder / f"engine-{number}.log"
            url = f"file://{root}"
            if options.compress:
                is_s3, how = name.startswith("S3"), {"compress": _COMPRESSED[name]}
                url = server.tier_url(f"kv/{number}", **how) if is_s3 else f"{url}?{urlencode(how)}"
            engine = Engine(interpreter, model, log, offloading(name, url, root), **lengths, **more)
            sides[name] = Side(
                stack.enter_context(engine),
                root,
                chunks,
                chunk_bytes,
                is_rounded=options.compress,
            )
            print(f"started: {name}", file=sys.stderr, flush=True)
        group = f"{options.tokens:,} tokens"
        bench.measure(group, {name: side.serve for name, side in sides.items()})
        if not options.compress:
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
