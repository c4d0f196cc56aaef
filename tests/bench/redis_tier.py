"""What the Redis tier moves, beside redis-py's plain calls and redis-benchmark.

Usage: python tests/bench/redis_tier.py [--rounds N] [--total SIZE] [--sizes SIZE ...]

Starts a redis-server of its own on the loopback. Each round measures every way in turn, so that a
noisy machine is noisy for all of them; the table shows medians over the rounds. The ways:

    kvtier     RedisTier, as its runner calls it, on the runner's event loop
    redis-py   asyncio get and set, as many at a time as the tier has connections
    benchmark  redis-benchmark with as many clients: the limit of the server and the loopback

MiB/s are of payload; a ratio is to redis-benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

from kvtier_redis import RedisTier
from kvtier_sdk import (
    Namespace,
    RequestContext,
    SystemClock,
    TierContext,
    TierSpec,
    Transfer,
    format_bytes,
)
from kvtier_sdk.units import parse_bytes

WAYS = ("kvtier", "redis-py", "benchmark")
_HEADER_BYTES = 64
_BATCH_BYTES = 8 * 2**20
_REQUEST = RequestContext("bench")


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="to take medians over (%(default)s)")
    parser.add_argument("--total", type=parse_bytes, default="512MiB", help="%(default)s a way")
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[2 * 2**20, 128 * 2**10])
    parser.add_argument("--connections", type=int, default=4, help="of each way (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        server, port = _start_server(directory)
        try:
            for size_bytes in arguments.sizes:
                _compare(port, size_bytes, arguments)
        finally:
            server.kill()
            server.wait()


def _start_server(directory: str) -> tuple[subprocess.Popen[bytes], int]:
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is missing: 'make redis-server'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
    server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server, port
        time.sleep(0.01)
    raise SystemExit("redis-server did not start")


def _compare(port: int, size_bytes: int, arguments: argparse.Namespace) -> None:
    chunks = max(arguments.connections, arguments.total // size_bytes)
    figures: dict[tuple[str, str], list[float]] = {}
    for _, way in itertools.product(range(arguments.rounds), WAYS):
        rates = _measure(way, port, size_bytes, chunks, arguments.connections)
        for operation, rate in zip(("store", "load"), rates, strict=True):
            figures.setdefault((way, operation), []).append(rate)
    print(
        f"\nchunks of {format_bytes(size_bytes)}, {arguments.connections} connections, "
        f"{arguments.rounds} rounds"
    )
    print(f"{'':10}{'':8}{'MiB/s':>10}{'least':>10}{'most':>10}{'ratio':>8}")
    for operation, way in itertools.product(("store", "load"), WAYS):
        rates = figures[way, operation]
        limit = statistics.median(figures["benchmark", operation])
        middle = statistics.median(rates)
        print(
            f"{way:10}{operation:8}{middle:10.0f}{min(rates):10.0f}{max(rates):10.0f}"
            f"{middle / limit:8.2f}"
        )


def _measure(
    way: str, port: int, size_bytes: int, chunks: int, connections: int
) -> tuple[float, float]:
    """MiB/s stored and loaded."""
    moved_mib = chunks * size_bytes / 2**20
    if way == "benchmark":
        seconds = [
            _benchmark(port, size_bytes, chunks, connections, test) for test in ["set", "get"]
        ]
    else:
        move = _kvtier if way == "kvtier" else _redis_py
        with asyncio.Runner(loop_factory=SystemClock().new_event_loop) as runner:
            seconds = runner.run(move(port, size_bytes, chunks, connections))
    store_s, load_s = seconds
    return moved_mib / store_s, moved_mib / load_s


def _benchmark(port: int, size_bytes: int, chunks: int, connections: int, test: str) -> float:
    """Seconds that redis-benchmark takes for as many requests."""
    options = ["-p", port, "-t", test, "-d", size_bytes, "-n", chunks, "-c", connections, "--csv"]
    command = ["redis-benchmark", *map(str, options)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    per_second = float(said.splitlines()[-1].split(",")[1].strip('"'))
    return chunks / per_second


async def _timed(move: Awaitable[None]) -> float:
    start_s = time.perf_counter()
    await move
    return time.perf_counter() - start_s


async def _kvtier(port: int, size_bytes: int, chunks: int, connections: int) -> list[float]:
    spec = TierSpec.from_url(f"redis://127.0.0.1:{port}?connections={connections}")
    context = TierContext(
        name="redis",
        namespace=Namespace({"bench": 1}),
        chunk_bytes=size_bytes,
        header_bytes=_HEADER_BYTES,
        payload_bytes=size_bytes,
        clock=SystemClock(),
        logger=logging.getLogger("bench"),
        report_removed=lambda keys: None,
    )
    tier = RedisTier(spec.config, context)
    await tier.open()
    keys = [b"%020d" % (index % 16) for index in range(chunks)]
    header, payload = memoryview(bytearray(_HEADER_BYTES)), memoryview(bytearray(size_bytes))
    batch_chunks = max(1, _BATCH_BYTES // size_bytes)

    async def move(call: Callable[[Sequence[Transfer]], Awaitable[Sequence[object]]]) -> None:
        starts = iter(range(0, chunks, batch_chunks))

        async def lane() -> None:
            for start in starts:
                batch = keys[start : start + batch_chunks]
                verdicts = await call([Transfer(key, _REQUEST, header, payload) for key in batch])
                if any(verdicts):
                    raise SystemExit(f"failed: {verdicts}")

        await asyncio.gather(*(lane() for _ in range(2)))

    try:
        return [await _timed(move(tier.store)), await _timed(move(tier.load))]
    finally:
        await tier.close()


async def _redis_py(port: int, size_bytes: int, chunks: int, connections: int) -> list[float]:
    value = os.urandom(size_bytes)

    async with Redis(port=port) as client:

        async def move(call: Callable[[bytes], Awaitable[object]]) -> None:
            rest = iter(range(chunks))

            async def lane() -> None:
                for index in rest:
                    await call(b"py%020d" % (index % 16))

            await asyncio.gather(*(lane() for _ in range(connections)))

        return [
            await _timed(move(lambda name: client.set(name, value))),
            await _timed(move(client.get)),
        ]


if __name__ == "__main__":
    main()
