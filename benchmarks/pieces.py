"""The cost of an object in pieces: the memcached example, beside itself with whole values.

Usage: python benchmarks/pieces.py [--chunk 2MiB] [--pieces 4MiB 1MB 256KiB] [--rounds N] ...

Each round stores, looks up and loads the same chunks in every way, one after the other, on one
memcached server that takes values of 16 MiB; the table shows medians over the rounds. An object in
pieces has an index besides. Times are from hand-over to the last verdict, of a tier in a thread;
CPU is that of this process. A ratio is to whole values, above 1 where pieces take longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from sealed import cpu_spent, finish

from kvtier_sdk import (
    HostPool,
    Namespace,
    RequestContext,
    RunnerOptions,
    TierListener,
    TierSpec,
    make_offload_key,
    open_tier,
)
from kvtier_sdk.options.units import format_bytes, parse_bytes

_EXAMPLE = Path(__file__).parents[1] / "examples" / "kvtier-memcached"
sys.path += [str(_EXAMPLE), str(_EXAMPLE / "tests")]

from memcached_server import MemcachedServer  # noqa: E402

from kvtier_memcached import MemcachedTier, MemcachedTierConfig  # noqa: E402

_REQUEST = RequestContext("bench")
OPERATIONS = ("store", "lookup", "load")


class WholeTier(MemcachedTier):
    """The same tier, with each chunk in one value."""

    async def contains_chunk(self, key: Any) -> bool:
        return await self.has(self._name(key))

    async def store_chunk(self, transfer: Any) -> None:
        await self.put(self._name(transfer.key), transfer.buffers)

    async def load_chunk(self, transfer: Any) -> None:
        await self.get(self._name(transfer.key), transfer.buffers)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pieces = ["4MiB", "1MB", "256KiB"]
    parser.add_argument("--chunk", type=parse_bytes, default="2MiB", help="%(default)s")
    parser.add_argument("--total", type=parse_bytes, default="128MiB", help="%(default)s")
    parser.add_argument(
        "--pieces", nargs="+", default=pieces, help=f"lengths of a piece ({' '.join(pieces)})"
    )
    parser.add_argument("--rounds", type=int, default=7, help="to take medians over (%(default)s)")
    arguments = parser.parse_args()
    ways = ["whole", *arguments.pieces]
    # By operation and way: seconds and CPU seconds of each round.
    figures: dict[tuple[str, str], list[list[float]]] = {}
    server = MemcachedServer("-I", "16m", "-m", "4096").start()
    pool = HostPool(arguments.total // arguments.chunk, arguments.chunk)
    try:
        for slot in range(pool.slots):
            pool.view(slot)[:] = os.urandom(arguments.chunk)
        for number in range(arguments.rounds + 1):
            for way in ways[:: -1 if number % 2 else 1]:  # none is always the first
                server.ask(b"flush_all")
                measured = measure(way, server, pool)
                if number:  # the first one warms up
                    for operation, spent in zip(OPERATIONS, measured, strict=True):
                        figures.setdefault((operation, way), []).append(spent)
    finally:
        pool.close()
        server.kill()
    print(f"{pool.slots} chunks of {format_bytes(arguments.chunk)}, medians of {arguments.rounds}")
    print(f"{'':24}{'us a chunk':>12}{'MB/s':>8}{'ratio':>7}{'CPU us':>9}{'ratio':>7}")
    for operation in OPERATIONS:
        whole = figures[operation, "whole"]
        for way in ways:
            rounds = figures[operation, way]
            wall_us, cpu_us = (
                statistics.median(each) * 1e6 / pool.slots for each in zip(*rounds, strict=True)
            )
            wall_ratio, cpu_ratio = (
                statistics.median(
                    ours[at] / theirs[at] for ours, theirs in zip(rounds, whole, strict=True)
                )
                for at in (0, 1)
            )
            mb_per_s = "" if operation == "lookup" else f"{arguments.chunk / wall_us:.0f}"
            count = -(-(arguments.chunk + 64) // parse_bytes(way)) if way != "whole" else 1
            name = way if way == "whole" else f"{count} of {way}"
            print(
                f"{operation:8}{name:16}{wall_us:12.0f}{mb_per_s:>8}{wall_ratio:7.2f}"
                f"{cpu_us:9.0f}{cpu_ratio:7.2f}"
            )


def measure(way: str, server: MemcachedServer, pool: HostPool) -> list[list[float]]:
    """Store, look up and load all chunks once, and return seconds and CPU seconds of each."""
    patience = dict.fromkeys(["lookup_deadline", "load_deadline", "store_deadline"], 60)
    options = {"runner": "thread", "max_queue": "4GiB", "required": True, **patience}
    config = {"servers": f"127.0.0.1:{server.port}"}
    if way != "whole":
        config["piece"] = way
    spec = TierSpec(
        "memcached",
        "memcached",
        WholeTier if way == "whole" else MemcachedTier,
        MemcachedTierConfig.model_validate(config),
        RunnerOptions.model_validate(options),
    )
    keys = [make_offload_key(slot.to_bytes(32, "big")) for slot in range(pool.slots)]
    slots = range(pool.slots)
    figures = []
    with open_tier(spec, pool, Namespace({"bench": way}), TierListener()) as client:
        for collect in (
            lambda: client.store(keys, slots, _REQUEST, whole=True),
            lambda: client.lookup(keys, _REQUEST),
            lambda: client.load(keys, slots, _REQUEST, whole=True),
        ):
            with cpu_spent(client) as spent:
                finish(client, collect(), spent)
            figures.append(spent)
    return figures


if __name__ == "__main__":
    main()
