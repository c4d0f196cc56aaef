import itertools
import os
from pathlib import Path

import pytest
from support.mooncake_store import MooncakeStore
from support.played import check_two_replays, write_trace
from support.unlimited import unlimited_hit_rate

from kvtier_sdk.cli.replay import read_trace

#: The number of requests to play from a production trace.
REQUESTS = 100
BESIDE = Path(__file__).parents[4] / "shared" / "traces" / "conversation-4k.jsonl"
TRACE = Path(os.environ.get("KVTIER_TRACE", BESIDE))


@pytest.fixture(params=["made up", "production"])
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, float]:
    path = tmp_path / "trace.jsonl"
    if request.param == "made up":
        return write_trace(path)
    if not TRACE.exists():
        pytest.skip("no trace: KVTIER_TRACE names none, and none lies beside the project")
    with TRACE.open() as lines:
        path.write_text("".join(itertools.islice(lines, REQUESTS)))
    return path, unlimited_hit_rate(read_trace(path))


def test_a_trace_is_found_whole_by_a_new_client(
    store: MooncakeStore, trace: tuple[Path, float]
) -> None:
    store.nodes[0].ask("remove_all", True)
    check_two_replays(*trace, store.url)
