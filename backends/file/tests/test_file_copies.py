import pytest
from support.copies import ByteLedger, check_no_copies


@pytest.mark.parametrize("direct_io", ["off", "auto"])
@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, monkeypatch, operation, direct_io):
    bench.chunk_bytes = 4 * 2**20
    ledger = ByteLedger(monkeypatch, "preadv", "pwritev")
    await check_no_copies(bench, await bench.open(direct_io=direct_io), ledger, operation)
