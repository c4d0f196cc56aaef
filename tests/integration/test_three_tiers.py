"""A production trace is replayed through all tiers, on real servers that die and come back.

The trace is the file that ``KVTIER_TRACE`` names, else a file beside the project, else generated.
``KVTIER_TRACE_REQUESTS`` is the number of requests; ``make test-trace`` sets it to 4,000.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.stores import Folder, RedisStore, S3Store, Store
from support.unlimited import unlimited_hits

from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, read_trace, replay

CHUNK_BYTES = 4096
#: Too few slots for the chunks that the trace reuses, so hits must come from the tiers.
SLOTS = 250
REQUESTS = int(os.environ.get("KVTIER_TRACE_REQUESTS", "30"))
BESIDE = Path(__file__).parents[3] / "shared" / "traces" / "conversation-4k.jsonl"
TRACE = Path(os.environ["KVTIER_TRACE"]) if "KVTIER_TRACE" in os.environ else BESIDE
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def workload() -> list[ReplayRequest]:
    if TRACE.exists() or "KVTIER_TRACE" in os.environ:
        return read_trace(TRACE)[:REQUESTS]
    return chat_workload(REQUESTS, 0)


@pytest.fixture(scope="module")
def trace(workload: list[ReplayRequest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    numbers: dict[bytes, int] = {}
    lines = [
        json.dumps({"hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys]})
        for request in workload
    ]
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, Any]]:
    made: dict[str, Store] = {}
    with ExitStack() as ended:
        for kind in (Folder, RedisStore, S3Store):
            made[kind.name] = kind(tmp_path / kind.name, CHUNK_BYTES)
            ended.callback(made[kind.name].kill)
        yield made


def distinct_chunks(workload: Sequence[ReplayRequest]) -> int:
    return len({key for request in workload for key in request.keys})


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


def test_tiers_hit_what_an_unlimited_cache_hits_and_a_new_client_everything(
    workload: list[ReplayRequest], trace: Path, stores: dict[str, Store]
) -> None:
    chunks, distinct = sum(len(request.keys) for request in workload), distinct_chunks(workload)
    first = play(trace, *stores.values())
    assert first["hit_blocks"] == unlimited_hits(workload)
    for name, store in stores.items():
        assert first["tiers"][name]["stored_blocks"] == store.chunks() == distinct
    # A new client finds every chunk, both in all tiers together and in each tier alone.
    again = [play(trace, *stores.values()), *(play(trace, store) for store in stores.values())]
    assert [report["hit_blocks"] for report in again] == [chunks] * len(again)
    for report in [first, *again]:
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
        assert not any(report["left_over"].values()), report["left_over"]


@pytest.mark.parametrize("killed", ["redis", "s3"])
def test_a_server_that_dies_and_comes_back_costs_its_share_and_nothing_else(
    workload: list[ReplayRequest],
    stores: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    killed: str,
) -> None:
    caplog.set_level(logging.INFO, f"kvtier.tier.{killed}")
    # Half of the trace keeps the test short. The killed tier is asked first, so its loss matters.
    workload = workload[: len(workload) // 2]
    victim, others = stores[killed], [stores[name] for name in stores if name != killed]
    entries = [
        {"url": victim.url, "probe_interval": 0.1, "max_probe_interval": 0.1},
        *({"url": store.url} for store in others),
    ]
    config = TieringConfig.from_dict({"slots": SLOTS, "chunk_bytes": CHUNK_BYTES, "tiers": entries})
    survived = []

    def disturb(done: int) -> None:
        if done == len(workload) // 3:
            victim.kill()
        elif done == 2 * len(workload) // 3:
            victim.start()
            survived.append(victim.chunks())
            end_s = time.monotonic() + _PATIENCE_S
            while "writes are taken again" not in caplog.text:
                assert time.monotonic() < end_s, "the tier is not used again"
                time.sleep(0.01)

    report = replay(workload, config, on_progress=disturb)
    assert report.hit_chunks == unlimited_hits(workload)
    assert report.wrong_bytes == 0
    assert not any(report.left_over.values()), report.left_over
    tiers = {tier.name: tier for tier in report.tiers}
    distinct = distinct_chunks(workload)
    assert tiers[killed].stored_chunks < distinct
    assert tiers[killed].failures
    for store in others:
        tier = tiers[store.name]
        assert tier.stored_chunks == store.chunks() == distinct
        assert tier.failures == tier.dropped == {}
    assert victim.chunks() > survived[0]
