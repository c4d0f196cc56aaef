"""A process that stores and loads chunks on a shared root.

Usage: sharing_worker.py ROOT OPTIONS, where OPTIONS is a JSON object:

    seed, batches, keys: the workload; ``keys`` is the number of different keys
    capacity_chunks, chunk_bytes: capacity and chunk size of the tier
    gate: "write" to print "writing" during the first write and hang there

Prints "ready", "half" after half of the batches, and at the end a JSON object with the count of
each outcome. A wrong byte or an illegal outcome ends the process with a traceback.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from conftest import Workbench

from kvtier_file import compiled
from kvtier_sdk import ChunkNotFoundError, TierCapacityError


async def work(bench: Workbench, options: dict) -> Counter[str]:
    rng = random.Random(options["seed"])
    keys = [index.to_bytes(20, "big") for index in range(options["keys"])]
    outcomes: Counter[str] = Counter()
    tier = await bench.open(capacity=options["capacity_chunks"] * bench.object_bytes)
    print("ready", flush=True)
    if options.get("gate") == "write":
        hang_in_the_first_write()
    for batch in range(options["batches"]):
        if batch == options["batches"] // 2:
            print("half", flush=True)
        chosen = rng.sample(keys, rng.randint(1, 3))
        if rng.random() < 0.6:
            for verdict in await bench.put(tier, *chosen):
                assert verdict is None or type(verdict) is TierCapacityError, repr(verdict)
                outcomes["refused" if verdict else "stored"] += 1
            continue
        transfers = [bench.empty(key) for key in chosen]
        for transfer, verdict in zip(transfers, await tier.load(transfers), strict=True):
            assert verdict is None or type(verdict) is ChunkNotFoundError, repr(verdict)
            assert verdict or bench.holds(transfer), "wrong bytes"
            outcomes["missed" if verdict else "loaded"] += 1
    await bench.close()
    outcomes["removed"] = len(bench.removed)
    return outcomes


def hang_in_the_first_write() -> None:
    # Use the Python code, because only Python's system calls can be replaced.
    compiled.batch_io = None
    real = os.pwritev

    def hanging(*args):
        real(*args)
        print("writing", flush=True)
        time.sleep(600)

    os.pwritev = hanging


def main() -> None:
    options = json.loads(sys.argv[2])
    bench = Workbench(Path(sys.argv[1]), options["chunk_bytes"])
    print(json.dumps(asyncio.run(work(bench, options))), flush=True)


if __name__ == "__main__":
    main()
