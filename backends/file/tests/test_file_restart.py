import json
import os

import pytest

from kvtier_file import recency
from kvtier_file.shared_files import new_lease
from kvtier_file.temporaries import temporary_names
from kvtier_sdk import Namespace

KEYS = [index.to_bytes(20, "big") for index in range(20)]


@pytest.mark.parametrize("step_s", [-86400, -1, 86400])
@pytest.mark.parametrize("restart", [False, True])
async def test_setting_the_clock_keeps_the_order(bench, step_s, restart, monkeypatch):
    monkeypatch.setattr(
        recency, "_STAY", (1.0,) * len(recency._STAY)
    )  # the number of uses does not matter
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


async def test_foreign_files_are_left_alone_and_not_counted(bench):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    shard = bench.file(KEYS[0]).parent
    foreign = [bench.root / name for name in ("lost+found", "a note", "0" * 32)]
    foreign += [bench.directory / "readme.txt", bench.directory / "tmp" / "not-ours"]
    foreign += [shard / "notes.kv", shard / f"{KEYS[1].hex()}.bak"]
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
    names = [next(temporary_names(lease)) for lease in (living, new_lease())]
    for name in [*names, "not-ours"]:
        (directory / "tmp" / name).write_bytes(bytes(4096))
    bench.facts = {"model": "other"}
    await bench.open()
    assert sorted(os.listdir(directory / "tmp")) == sorted([names[0], "not-ours"])


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


async def test_usage_survives_and_a_wrong_length_does_not(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:4])
    os.truncate(bench.file(KEYS[0]), 1)
    await bench.close()
    tier = await bench.open()
    assert (await tier.usage()).used_bytes == 3 * bench.object_bytes == bench.stored_bytes()
    assert await bench.has(tier, *KEYS[:4]) == [False, True, True, True]
