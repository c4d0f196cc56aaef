"""A production trace is replayed through all tiers, on real servers.

The trace is the file that ``KVTIER_TRACE`` names, else a file beside the project, else generated.
``KVTIER_TRACE_REQUESTS`` is the number of requests; ``make test-trace`` sets it to 4,000.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.stores import Folder, RedisStore, S3Store, Store
from support.unlimited import unlimited_hits

from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, read_trace

CHUNK_BYTES = 4096
#: Too few slots for the chunks that the trace reuses, so hits must come from the tiers.
SLOTS = 250
REQUESTS = int(os.environ.get("KVTIER_TRACE_REQUESTS", "30"))
BESIDE = Path(__file__).parents[3] / "shared" / "traces" / "conversation-4k.jsonl"
TRACE = Path(os.environ["KVTIER_TRACE"]) if "KVTIER_TRACE" in os.environ else BESIDE


def read_workload() -> list[ReplayRequest]:
    if TRACE.exists() or "KVTIER_TRACE" in os.environ:
        return read_trace(TRACE)[:REQUESTS]
    return chat_workload(REQUESTS, 0)


def play(trace: Path, *stores: Store) -> dict[str, Any]:
    """Replay the trace in a new process. Return the report, with the tiers as a dict by name."""
    command = [sys.executable, "-c", "from kvtier_sdk.cli import main; main()", "replay", "--json"]
    command += ["--trace", str(trace), "--chunk-bytes", str(CHUNK_BYTES), "--slots", str(SLOTS)]
    for store in stores:
        command += ["--tier", store.url]
    # Leave stderr to the terminal, because it shows the progress of a long run.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    report["tiers"] = {tier["name"]: tier for tier in report["tiers"]}
    return report


def test_tiers_hit_what_an_unlimited_cache_hits_and_a_new_client_everything(tmp_path: Path) -> None:
    workload = read_workload()
    numbers: dict[bytes, int] = {}
    lines = [
        json.dumps({"hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys]})
        for request in workload
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    with ExitStack() as ended:
        stores: list[Store] = []
        for kind in (Folder, RedisStore, S3Store):
            stores.append(kind(tmp_path / kind.name, CHUNK_BYTES))
            ended.callback(stores[-1].kill)
        first, again = (play(trace, *stores) for _ in range(2))
        for store in stores:
            assert first["tiers"][store.name]["stored_blocks"] == store.chunks() == len(numbers)
    assert first["hit_blocks"] == unlimited_hits(workload)
    assert again["hit_blocks"] == sum(len(request.keys) for request in workload)
    for report in (first, again):
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
        assert not any(report["left_over"].values()), report["left_over"]
