import pytest
from support.played import replay, write_trace


def test_a_trace_hits_what_an_unlimited_cache_hits_and_a_new_client_everything(
    server, tmp_path
) -> None:
    trace, unlimited = write_trace(tmp_path / "trace.jsonl")
    first = replay(trace, "--tier", f"{server.url}?ttl=1h")
    assert first["hit_rate"] == pytest.approx(unlimited)
    second = replay(trace, "--tier", f"{server.url}?ttl=1h")
    assert second["hit_rate"] == 1.0
    for report in (first, second):
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
    host, redis = second["tiers"]
    assert host["hit_blocks"] + redis["hit_blocks"] == second["blocks"]
    assert redis["hit_blocks"] > 0
