from support.played import check_two_replays, write_trace


def test_a_trace_is_found_whole_by_a_new_client(server, tmp_path) -> None:
    check_two_replays(*write_trace(tmp_path / "trace.jsonl"), f"{server.url}?ttl=1h")
