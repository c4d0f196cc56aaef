import pytest
from support.copies import ByteLedger, traced_peak

KEYS = [index.to_bytes(20, "big") for index in range(8)]


@pytest.mark.parametrize("direct_io", ["off", "auto"])
@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, monkeypatch, operation, direct_io):
    bench.chunk_bytes = 4 * 2**20
    tier = await bench.open(direct_io=direct_io)
    full = [bench.full(key) for key in KEYS]
    if operation == "load":
        assert await tier.store(full) == [None] * 8
    batch = full if operation == "store" else [bench.empty(key) for key in KEYS]
    ledger = ByteLedger(monkeypatch, "preadv", "pwritev")
    ledger.begin(batch)
    with traced_peak() as peak:
        assert await getattr(tier, operation)(batch) == [None] * 8
    assert all(map(bench.holds, batch))
    # Every byte of header and payload moves once, between the disk and its own buffer.
    assert ledger.direct_bytes == 8 * bench.object_bytes
    assert ledger.other_bytes < 8 * 200
    assert peak.allocated_bytes < 256 * 1024
