"""Time to the first token, and what a damaged store does: vLLM's file tier beside ours.

Usage: .venv-vllm/bin/python benchmarks/first_token.py [--tokens N] [--rounds N] [--layers N]

Real engines on the CPU, one for each way to offload, serve the same prompts in turns. Each round
serves a new prompt twice: the first time it is computed and stored; then the device cache and the
host pool are emptied, and the second time its chunks come from the files. The table shows medians
and quartiles over the rounds. At the end one byte in each file is flipped, and a prompt that was
stored is served from them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import results
from results import Series
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

from kvtier_sdk.options.units import format_bytes

#: A model whose keys and values take 4 KiB a layer and token, in float32.
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


@dataclass
class Side:
    """One way to offload, and what was measured of it.

    Attributes:
        engine: its engine.
        root: the directory of its files.
        computed_s: time to the first token of prompts that were computed.
        loaded_s: the same, of prompts whose chunks came from files.
        cached: tokens of the last of these that were not computed.
    """

    engine: Engine
    root: Path
    computed_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    cached: int = 0

    def serve(self, prompt: list[int]) -> None:
        """Serve a new prompt, and once more from files."""
        self.computed_s.append(self._serve(prompt)["first_token_s"])
        self._forget()
        served = self._serve(prompt)
        self.loaded_s.append(served["first_token_s"])
        self.cached = served["cached"]

    def serve_damaged(self, prompt: list[int], chunk_bytes: int) -> tuple[int, bool]:
        """Serve a new prompt, and once more from files in each of which a byte was flipped.

        Returns:
            The tokens that were not computed, and whether tokens and logprobs were the same.
        """
        before = self._serve(prompt)
        self._forget()
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_size >= chunk_bytes:
                flip_byte(path)
        after = self._serve(prompt)
        return after["cached"], same([before], [after])

    def _serve(self, prompt: list[int]) -> dict[str, Any]:
        (output,) = self.engine.generate(prompts=[prompt])
        self.engine.settle()
        return dict(output)

    def _forget(self) -> None:
        self.engine.reset_all()
        self.engine.settle()


def flip_byte(path: Path) -> None:
    """Flip all bits of the byte in the middle of a file."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0xFF]))


def offloading(name: str, root: Path) -> dict[str, Any]:
    """Return vLLM's ``kv_connector_extra_config`` of a way."""
    if name == OURS_A:
        return OUR_TIERS.offloading(f"file://{root}", host_bytes=_POOL_BYTES) or {}
    if name == OURS_B:
        return OUR_MANAGER.offloading(f"file://{root}", host_bytes=_POOL_BYTES) or {}
    return {
        # vLLM's own spec does not run on a CPU; ours differs from it in the copies to the device.
        "spec_name": "KVTierCPUTieringSpec",
        "spec_module_path": "kvtier_sdk.integrations.vllm",
        "cpu_bytes_to_use": _POOL_BYTES,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
    }


@contextmanager
def sides(folder: Path, layers: int, tokens: int, threads: int) -> Iterator[dict[str, Side]]:
    """Start the engines, and end them."""
    model = make_model(folder / "model", num_hidden_layers=layers, **SHAPE)
    interpreter = Interpreter(folder / "interpreter", threads=threads)
    with ExitStack() as stack:
        stack.callback(interpreter.close)
        started = {}
        for number, name in enumerate((VLLM, OURS_A, OURS_B)):
            root = folder / f"kv-{number}"
            root.mkdir(mode=0o700)
            engine = Engine(
                interpreter,
                model,
                folder / f"engine-{number}.log",
                offloading(name, root),
                max_model_len=tokens + 256,
                # A prompt is computed in one step, as it would be on a device.
                max_num_batched_tokens=tokens + 256,
            )
            started[name] = Side(stack.enter_context(engine), root)
            print(f"started: {name}", file=sys.stderr, flush=True)
        yield started


def quartiles(values: Sequence[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return f"{1e3 * middle:,.0f} ({1e3 * low:,.0f}-{1e3 * high:,.0f})"


def series(
    group: str, started: dict[str, Side], damaged: dict[str, tuple[int, bool]]
) -> list[Series]:
    """Return the figures of all ways; those of damaged files are of one prompt."""
    found = []
    for name, side in started.items():
        for case, times_s in (("computed", side.computed_s), ("from files", side.loaded_s)):
            times_ms = [1e3 * one for one in times_s]
            found.append(Series(group, case, name, "time to first token", "ms", times_ms))
        cached, equal = damaged[name]
        found.append(Series(group, "damaged files", name, "tokens from them", "tokens", [cached]))
        found.append(Series(group, "damaged files", name, "same answer", "", [float(equal)]))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="%(default)s")
    parser.add_argument("--layers", type=int, default=16, help="of the model (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of an engine (%(default)s)")
    parser.add_argument("--root", help="a directory on the disk to measure")
    results.add_option(parser)
    options = parser.parse_args()
    chunks = options.tokens // BLOCK_TOKENS
    chunk_bytes = BLOCK_TOKENS * options.layers * 4096
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-first-", dir=options.root) as folder,
        sides(Path(folder), options.layers, options.tokens, options.threads) as started,
    ):
        for number in range(options.rounds):
            for name in results.in_turns(started, number):
                started[name].serve(make_prompt(number, chunks))
        damaged = {
            name: side.serve_damaged(make_prompt(options.rounds, chunks), chunk_bytes)
            for name, side in started.items()
        }
    print(
        f"{chunks} chunks of {format_bytes(chunk_bytes)}, {options.tokens} tokens; "
        f"{options.rounds} rounds; median (quartiles)"
    )
    head = ("", "computed, ms", "from files, ms", "cached", "ratio", "damaged: cached", "answer")
    rows = [head]
    peer_s = statistics.median(started[VLLM].loaded_s)
    for name, side in started.items():
        cached, equal = damaged[name]
        rows.append(
            (
                name,
                quartiles(side.computed_s),
                quartiles(side.loaded_s),
                f"{side.cached:,}",
                f"{statistics.median(side.loaded_s) / peer_s:.2f}",
                f"{cached:,}",
                "the same" if equal else "DIFFERS",
            )
        )
    group = f"{options.tokens:,} tokens"
    results.write(options.json, series(group, started, damaged), root=options.root)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
