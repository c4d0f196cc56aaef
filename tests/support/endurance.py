"""Replays chats for a long time; fails on a wrong byte, a leftover, or growing use of resources.

Usage: python -m support.endurance [--requests N] [--concurrency N] [--faults | --tier URL ...]

The host pool has room for a tenth of the chats' chunks, up to 4,000 chunks, so that evictions and
promotions never stop. The run samples memory, descriptors, threads and /dev/shm. The default tiers
stop growing once they have reached their capacity. With ``--faults``, a file tier runs in a process
and a Redis tier in a thread, and each second a fault hits one of the two tiers. The exit status is
1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import chat_workload, replay
from support.redis_server import Server
from support.tier_process import tier_processes

_CHUNK_BYTES = 4096
_SAMPLES = 40
_MOST_SLOTS = 4000
#: A run with fewer requests is not checked for growth, because it ends while memory still fills.
_LONG_REQUESTS = 20_000
#: Relative growth allowed from the second to the last quarter, because allocators grow in steps.
_GROWTH = 0.05
_MORE = 4  # absolute growth allowed in addition, because tiers reconnect after faults
_FAULT_EVERY_S = 1.0
_FAULT_S = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--concurrency", type=int, default=64, help="default: 64")
    parser.add_argument("--seed", type=int, default=0, help="of the workload; default: 0")
    default = "repeatable; default: memory of 64MiB, then files of 64MiB in a new directory"
    parser.add_argument("--tier", action="append", metavar="URL", help=default)
    parser.add_argument("--faults", action="store_true", help="a fault each second")
    arguments = parser.parse_args()
    workload = chat_workload(arguments.requests, arguments.seed)
    distinct = len({key for request in workload for key in request.keys})
    curve: list[dict[str, int]] = []
    every = max(1, arguments.requests // _SAMPLES)
    print("requests", *(f"{name:>13}" for name in take_sample()))

    def on_progress(done: int) -> None:
        if done % every == 0:
            curve.append(take_sample())
            print(f"{done:8}", *(f"{value:13,}" for value in curve[-1].values()), flush=True)

    happened: Counter[str] = Counter()
    with contextlib.ExitStack() as ended:
        root = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-endurance-")))
        tiers = arguments.tier or ["memory:?capacity=64MiB", f"file://{root}/kv?capacity=64MiB"]
        if arguments.faults:
            options = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
            server = Server(root / "redis", *options).start()
            ended.callback(server.kill)
            quick = "probe_interval=200ms&max_probe_interval=200ms"
            tiers = [
                f"{server.url}?runner=thread&{quick}",
                f"file://{root}/kv?capacity=16MiB&runner=process&{quick}",
            ]
            ended.enter_context(faults(server, root / "kv", happened))
        slots = min(_MOST_SLOTS, max(1, distinct // 10))
        config = TieringConfig.from_dict(
            {"slots": slots, "chunk_bytes": _CHUNK_BYTES, "tiers": tiers}
        )
        report = replay(
            workload, config, concurrency=arguments.concurrency, on_progress=on_progress
        )
    print(
        f"{report.chunks:,} chunks, {distinct:,} of them distinct, {slots:,} slots: hit "
        f"rate {report.hit_rate:.3f}, {report.dropped:,} dropped, {report.elapsed_s:.0f} s"
    )
    for fault, count in happened.items():
        print(f"{count:5} times: {fault}")
    is_long = arguments.requests >= _LONG_REQUESTS
    wrongs = [f"{report.wrong_bytes} wrong bytes"] if report.wrong_bytes else []
    wrongs += [f"{count} {what} left over" for what, count in report.left_over.items() if count]
    wrongs += growth(curve) if is_long else []
    grown = "nothing grows" if is_long else "too short to tell of growth"
    print(*(wrongs or [f"no wrong byte, nothing left, {grown}"]), sep="\n")
    return 1 if wrongs else 0


def take_sample() -> dict[str, int]:
    children = tier_processes(os.getpid())
    status = Path("/proc/self/status").read_text(encoding="ascii")
    # Count RssShmem, because a shared host pool is a memfd without a name in /dev/shm.
    pool_kib = int(status.partition("RssShmem:")[2].split()[0])
    left = [file.stat().st_size for file in Path("/dev/shm").glob("*kvtier*") if file.is_file()]
    return {
        "engine_kib": _resident_kib("self"),
        "tiers_kib": sum(map(_resident_kib, children)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": len(children),
        "shm_kib": pool_kib + sum(left) // 1024,
    }


def _resident_kib(process: str | int) -> int:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0  # the process has just ended
    return pages * resource.getpagesize() // 1024


def growth(curve: list[dict[str, int]]) -> list[str]:
    quarter = len(curve) // 4
    grown = []
    for name in curve[0]:
        values = [sample[name] for sample in curve]
        before = statistics.median(values[quarter : 2 * quarter])
        after = statistics.median(values[-quarter:])
        if after > before * (1 + _GROWTH) + _MORE:
            grown.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return grown


@contextlib.contextmanager
def faults(server: Server, root: Path, happened: Counter[str]) -> Iterator[None]:
    over = threading.Event()

    def freeze() -> None:
        """redis-server frozen for 0.2 s"""
        server.pause()
        over.wait(_FAULT_S)
        server.resume()

    def kill() -> None:
        """redis-server killed and restarted empty"""
        server.kill()
        over.wait(_FAULT_S)
        server.start()

    def remove() -> None:
        """the file tier's root removed"""
        subprocess.run(["rm", "-rf", root], capture_output=True, check=False)

    def kill_tier() -> None:
        """the file tier's process killed"""
        for process in tier_processes(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def run() -> None:
        next_s = time.monotonic()
        # Kill the tier's process rarely, because the wait before a restart grows with each kill.
        for fault in itertools.cycle([freeze, remove, kill, remove] * 10 + [kill_tier]):
            next_s = max(next_s + _FAULT_EVERY_S, time.monotonic())
            if over.wait(next_s - time.monotonic()):
                return
            happened[fault.__doc__ or ""] += 1
            fault()

    thread = threading.Thread(target=run, name="faults")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
