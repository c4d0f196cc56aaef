"""The cost of sealing: MiB/s and CPU of a tier with a codec, beside the same tier without one.

Usage: python benchmarks/sealed.py [--tiers memory file] [--runners thread process] [--rounds N] ...

Each tier is used as an engine uses it, with digests on.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from runner import Benchmark, Sample
from ways.engine_way import EngineWay
from ways.way import Work

from kvtier_sdk.options.units import parse_bytes

TIERS, RUNNERS = ("memory", "file"), ("thread", "process")


def main() -> None:
    """Measure each tier in each runner."""
    bench = Benchmark(__doc__, rounds=7)
    bench.option("--tiers", nargs="+", choices=TIERS, default=TIERS)
    bench.option("--runners", nargs="+", choices=RUNNERS, default=RUNNERS)
    bench.option("--total", type=parse_bytes, default="256MiB", help="%(default)s")
    bench.option("--chunk", type=parse_bytes, default="1MiB", help="%(default)s")
    options = bench.parse()
    chunks = options.total // options.chunk
    work = Work(options.chunk, header_bytes=64, chunks=chunks, keys=chunks, at_a_time=4)
    for tier, runner in itertools.product(options.tiers, options.runners):
        turn = partial(_turn, work, tier, runner, options.root)
        sides = {name: partial(turn, name == "sealed") for name in ("sealed", "plain")}
        bench.measure(f"{tier}, {runner}", sides)
    bench.finish()


def _turn(
    work: Work, tier: str, runner: str, root: Path, sealed: bool, number: int
) -> Iterator[Sample]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root) as directory:
        options = {"url": "memory:" if tier == "memory" else f"file://{directory}/kv?min_free=0"}
        if sealed:
            keys = Path(directory, "chunk.keys")
            keys.touch(mode=0o600)
            keys.write_text(os.urandom(32).hex())
            options["codec"] = f"aes-gcm:{keys}"
        yield from EngineWay(work, warm=True, runner=runner, **options).samples()


if __name__ == "__main__":
    main()
