import pytest
from support.played import check_two_replays, write_trace
from support.runners import RUNNERS


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_trace_is_found_whole_by_a_new_client(server, tmp_path, runner) -> None:
    url = server.tier_url(f"kv/replay-{runner}", runner=runner, lookup_deadline="20s")
    check_two_replays(*write_trace(tmp_path / "trace.jsonl"), url)
