import os
import shutil
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier_file import compiled
from kvtier_file.namespace import shard_of
from kvtier_sdk import ChunkError, ConfigError, TierAuthError, TierError

KEYS = [index.to_bytes(20, "big") for index in range(8)]


def spoil(path, how):
    if how == "mode":
        path.chmod(0o770)
    else:
        os.chown(path, 12345, -1)


FAULTS = [("mode", r"is writable by other users \(mode 0770\)"), ("owner", "another user, with id")]


@pytest.mark.parametrize("below", ["", "fingerprint", ".shared"])
@pytest.mark.parametrize(("how", "fault"), FAULTS)
async def test_a_root_that_others_can_change_is_refused(bench, how, fault, below):
    tier = await bench.open()
    assert await bench.put(tier, KEYS[0]) == [None]
    await bench.close()
    spoil(bench.root / (bench.namespace.fingerprint if below == "fingerprint" else below), how)
    with pytest.raises(ConfigError, match=f"{fault}.*mode 0700, or write permissions: 'warn'"):
        await bench.open()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("below", ["", "fingerprint", "fingerprint/shard"])
@pytest.mark.parametrize("how", ["mode", "owner"])
async def test_a_planted_copy_is_refused(bench, part, monkeypatch, how, below, is_compiled):
    monkeypatch.setattr(compiled, "batch_io", part if is_compiled else None)
    tier = await bench.open()
    assert await bench.put(tier, KEYS[0]) == [None]
    below = below.replace("fingerprint", bench.namespace.fingerprint)
    place = bench.root / below.replace("shard", shard_of(KEYS[0]))
    planted = place.rename(bench.root.with_name("planted"))
    # Leave out spare files, because the tier may remove one during the copy.
    shutil.copytree(planted, place, ignore=shutil.ignore_patterns("*.tmp"))
    spoil(place, how)
    if below == "":
        shutil.rmtree(planted)

    for call in (tier.load, tier.store, tier.lookup, tier.delete):
        transfer = bench.empty(KEYS[0])
        try:
            if call in (tier.load, tier.store):
                (verdict,) = await call([transfer])
            elif call == tier.lookup:
                await call([KEYS[0]], bench.request)
            else:
                await call([KEYS[0]])
        except TierError as error:
            verdict = error
        # A bad shard affects few chunks, so a load or a lookup reports a fault of the chunk only.
        is_own_fault = below.endswith("shard") and call in (tier.load, tier.lookup)
        assert isinstance(verdict, ChunkError if is_own_fault else TierAuthError)
        assert str(place) in str(verdict)
        assert "who could plant or read chunks" in str(verdict)
        assert not any(map(any, transfer.buffers))
    place.chmod(0o700)
    os.chown(place, os.geteuid(), -1)
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize("how", ["mode", "owner"])
async def test_a_root_that_others_can_change_is_used_with_a_warning(bench, caplog, how):
    bench.root.mkdir(mode=0o700)
    spoil(bench.root, how)
    tier = await bench.open(permissions="warn")
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])
    (message,) = caplog.messages
    assert "who could plant or read chunks" in message


async def test_a_namespace_that_root_made_is_trusted(bench):
    bench.root.mkdir(mode=0o755)
    await bench.open()


MAKE = {"dir": os.mkdir, "fifo": os.mkfifo, "link": lambda path: os.symlink("/dev/null", path)}

numbers = st.integers(0, 2**64 - 1)
small = st.integers(0, 5000)
rows = st.lists(st.tuples(st.binary(min_size=8, max_size=8), numbers), max_size=3)
records = st.lists(
    st.tuples(
        st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=200)
    ),
    max_size=4,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    generation=numbers,
    ledger_bytes=numbers | small,
    counters=st.tuples(numbers | small, numbers | small, numbers | small),
    count=st.none() | st.integers(0, 2**32 - 1),
    rows=rows,
    ledger=st.binary(max_size=500) | records,
    leases=st.sets(st.sampled_from(list(MAKE))),
)
async def test_forged_shared_files_make_no_store_fail(
    make_bench, generation, ledger_bytes, counters, count, rows, ledger, leases
):
    bench = make_bench()
    capacity = 4 * bench.object_bytes
    tier = await bench.open(capacity=capacity)
    assert await bench.put(tier, *KEYS[:4]) == [None] * 4
    shared = bench.root / ".shared"
    if isinstance(ledger, list):
        ledger = b"".join(
            struct.pack("<16sqqB", b"f" * 16, size, used, len(key)) + key
            for size, used, key in ledger
        )
        ledger_bytes = len(ledger)
    (shared / "ledger").write_bytes(ledger)
    body = struct.pack("<QQQQQI", generation, ledger_bytes, *counters, count or len(rows))
    body += b"".join(struct.pack("<8s16sQ", lease, b"f" * 16, size) for lease, size in rows)
    forged = b"kvtfile1" + b"\1\0\0\0" + struct.pack("<I", zlib.crc32(body)) + body
    (shared / "header").write_bytes(forged.ljust(4096, b"\0"))
    for kind in leases:
        path = shared / "leases" / kind.encode().ljust(8).hex()
        if not os.path.lexists(path):
            MAKE[kind](path)
    assert await bench.put(tier, *KEYS[4:]) == [None] * 4
    assert await bench.loads(tier, *KEYS[4:])
    await bench.close()
    # The first process to open a root counts the chunks' files, and ignores the shared state.
    reopened = await bench.open(capacity=capacity)
    assert await bench.put(reopened, *KEYS[:4]) == [None] * 4
    assert (await reopened.usage()).used_bytes == bench.stored_bytes() <= capacity
    await bench.close()
