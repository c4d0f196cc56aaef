"""Restarts: recency, temporary files of dead processes, manifests, and kills."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_file import recency
from kvtier_file.shared_files import new_lease
from kvtier_file.temporaries import TemporaryNames
from kvtier_sdk import Namespace

KEYS = [index.to_bytes(20, "big") for index in range(20)]

WRITER = """
import asyncio, importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("workbench", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

async def main():
    bench = module.Workbench(pathlib.Path(sys.argv[1]))
    tier = await bench.open(capacity=40 * bench.object_bytes)
    for index in range(10**6):
        key = index.to_bytes(20, "big")
        assert await bench.put(tier, key) == [None]
        print(index, flush=True)

asyncio.run(main())
"""


async def test_recency_survives(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:4])
    await bench.loads(tier, KEYS[1])
    await tier.touch([KEYS[2], KEYS[0]])
    await bench.close()
    tier = await bench.open(capacity=4 * bench.object_bytes)
    await bench.put(tier, *KEYS[4:7])
    # The order of use was 3, 1, 2, 0.
    assert bench.removed == [KEYS[3], KEYS[1], KEYS[2]]
    assert await bench.has(tier, *KEYS[:4]) == [True, False, False, False]


@pytest.mark.parametrize("step_s", [-86400, -1, 86400])
@pytest.mark.parametrize("restart", [False, True])
async def test_setting_the_clock_keeps_the_order(bench, step_s, restart, monkeypatch):
    monkeypatch.setattr(recency, "_STAY", (1.0,) * len(recency._STAY))  # time alone decides
    capacity = 4 * bench.object_bytes
    tier = await bench.open(capacity=capacity)
    await bench.put(tier, *KEYS[:4])
    await bench.loads(tier, KEYS[3])
    bench.clock.ahead_s = step_s
    if restart:
        await bench.close()
        tier = await bench.open(capacity=capacity)
    await bench.loads(tier, KEYS[0])
    await tier.touch([KEYS[2]])
    await bench.put(tier, KEYS[4], KEYS[5])
    await bench.put(tier, KEYS[0])
    await bench.put(tier, KEYS[6])
    # The order of use is now 4, 5, 0, 6.
    assert bench.removed == [KEYS[1], KEYS[3], KEYS[2]]
    await bench.put(tier, KEYS[7], KEYS[8])
    assert bench.removed[3:] == [KEYS[4], KEYS[5]]


@pytest.mark.parametrize("used_ns", [2**62, 2**63 - 1, 2**63, -1])
async def test_a_file_with_an_impossible_time_is_evicted_first(bench, used_ns):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:4])
    file = bench.file(KEYS[2])
    os.utime(file, ns=(used_ns, used_ns))
    assert file.stat().st_mtime_ns == used_ns
    await bench.close()
    tier = await bench.open(capacity=4 * bench.object_bytes)
    assert await bench.put(tier, *KEYS[4:6]) == [None] * 2
    assert bench.removed == [KEYS[2], KEYS[0]]


async def test_usage_survives_and_a_wrong_length_does_not(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:4])
    os.truncate(bench.file(KEYS[0]), 1)
    await bench.close()
    tier = await bench.open()
    assert (await tier.usage()).used_bytes == 3 * bench.object_bytes == bench.stored_bytes()
    assert await bench.has(tier, *KEYS[:4]) == [False, True, True, True]


async def test_foreign_files_are_left_alone_and_not_counted(bench):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    shard = bench.file(KEYS[0]).parent
    foreign = [
        bench.root / "lost+found",
        bench.root / "a note",
        bench.root / ("0" * 32),
        bench.directory / "readme.txt",
        bench.directory / "tmp" / "not-ours",
        shard / "notes.kv",
        shard / f"{KEYS[1].hex()}.bak",
    ]
    for path in foreign:
        path.write_bytes(b"mine")
    await bench.close()
    tier = await bench.open(capacity=2 * bench.object_bytes)
    assert (await tier.usage()).used_bytes == bench.object_bytes
    assert all(path.read_bytes() == b"mine" for path in foreign)


async def test_only_temporaries_of_dead_processes_are_swept(bench):
    await bench.put(await bench.open(), KEYS[0])
    directory = bench.directory
    (living,) = os.listdir(bench.root / ".shared" / "leases")
    names = [TemporaryNames(lease).new() for lease in (living, new_lease())]
    for name in [*names, "not-ours"]:
        (directory / "tmp" / name).write_bytes(bytes(4096))
    # The sweep includes other namespaces.
    bench.facts = {"model": "other"}
    await bench.open()
    assert sorted(os.listdir(directory / "tmp")) == sorted([names[0], "not-ours"])


async def test_a_writer_killed_at_work(bench):
    conftest = os.path.join(os.path.dirname(__file__), "conftest.py")
    tests = Path(__file__).parents[3] / "tests"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(bench.root), conftest],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tests)},
    )
    assert writer.stdout is not None
    with writer, writer.stdout as lines:
        stored = [int(next(lines)) for _ in range(25)]
        writer.send_signal(signal.SIGKILL)
        stored += [int(line) for line in lines]
    # As if it had also died a little earlier.
    (lease,) = os.listdir(bench.root / ".shared" / "leases")
    (bench.directory / "tmp" / TemporaryNames(lease).new()).write_bytes(bytes(100))
    tier = await bench.open(capacity=40 * bench.object_bytes)
    kept = stored[-39:]  # one more may have been under way, and have evicted the fortieth
    assert await bench.loads(tier, *(index.to_bytes(20, "big") for index in kept))
    assert bench.temporaries() == []
    sizes = {path.stat().st_size for path in bench.directory.glob("??/*.kv")}
    assert sizes == {bench.object_bytes}
    assert bench.stored_bytes() <= 40 * bench.object_bytes


async def test_the_manifest_holds_the_facts_and_is_not_replaced(bench):
    await bench.open()
    manifest = bench.directory / "manifest.json"
    text = manifest.read_text()
    assert text == Namespace(bench.facts).manifest_json()
    assert json.loads(text)["facts"]["dtype"] == "bf16"
    manifest.write_text("edited")
    await bench.close()
    await bench.open()
    assert manifest.read_text() == "edited"
    assert bench.temporaries() == []


@pytest.mark.parametrize("direct_io", ["off", "auto"])
async def test_two_namespaces_do_not_see_each_other(bench, direct_io):
    first = await bench.open(direct_io=direct_io)
    await bench.put(first, KEYS[0])
    bench.facts = {"model": "other"}
    second = await bench.open(direct_io=direct_io)
    assert await bench.has(second, KEYS[0]) == [False]
    await second.delete([KEYS[0]])
    assert await bench.has(first, KEYS[0]) == [True]
