"""An engine beside whose chunks lies one file that cannot be read. The superuser is no such engine.

Usage: unreadable_file.py ROOT RUNNER

Prints a JSON object: how often the chunk and its healthy neighbours were hits, what failed, and how
the chunk fares once it was stored again.
"""

import json
import os
import sys
from pathlib import Path

from support.live import live

from kvtier_sdk import make_offload_key
from kvtier_sdk.engine import ResetScope

KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(4)]
ROUNDS = 38


def main() -> None:
    root, runner = sys.argv[1:]
    url = f"file://{root}?runner={runner}&min_free=0"
    with live([url]) as engine:
        engine.store(engine.begin("first"), *KEYS)
    (file,) = Path(root).rglob(f"{KEYS[0].hex()}.kv")
    os.chmod(file, 0)
    hits = {"bad": 0, "good": 0}
    with live([url]) as engine:
        for number in range(ROUNDS):
            for name, keys in (("bad", KEYS[:1]), ("good", KEYS[1:])):
                request = engine.begin(f"{name} {number}")
                hits[name] += engine.settle(request, *keys) == ["HIT"] * len(keys)
                engine.manager.on_request_finished(request)
            engine.manager.reset_cache(ResetScope.PRIMARY)
            engine.rest()
        failures = dict(engine.manager.stats[1].failures)
        engine.store(engine.begin("recomputed"), KEYS[0])
        engine.manager.reset_cache(ResetScope.PRIMARY)
        request = engine.begin("again")
        again = engine.settle(request, *KEYS)
        if again == ["HIT"] * len(KEYS):
            engine.load(request, *KEYS)
    print(json.dumps({"hits": hits, "failures": failures, "again": again}))


if __name__ == "__main__":
    main()
