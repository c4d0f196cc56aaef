import pytest
from support.played import replay, write_trace
from support.runners import RUNNERS


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_trace_hits_what_an_unlimited_cache_hits_and_a_new_client_everything(
    server, tmp_path, runner
) -> None:
    trace, unlimited = write_trace(tmp_path / "trace.jsonl")
    url = server.tier_url(f"kv/replay-{runner}", runner=runner, lookup_deadline="20s")
    first = replay(trace, "--tier", url)
    assert first["hit_rate"] == pytest.approx(unlimited)
    second = replay(trace, "--tier", url)
    assert second["hit_rate"] == 1.0
    for report in (first, second):
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
    host, s3 = second["tiers"]
    assert host["hit_blocks"] + s3["hit_blocks"] == second["blocks"]
    assert s3["hit_blocks"] > 0
