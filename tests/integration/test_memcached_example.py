"""The memcached example stays small, runs from its wheel, and survives dead or hung servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import stores
from support.author import ROOT, environment_of, run, stranger

pytestmark = pytest.mark.reader

EXAMPLE = ROOT / "examples" / "kvtier-memcached"


@pytest.fixture(scope="session")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memcached")
    environment_of(EXAMPLE, wheels, directory)
    return directory


@pytest.fixture
def make_server() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make() -> Any:
        made.append(stores.make_server("-m", "256"))
        return made[-1].start()

    yield make
    for server in made:
        server.kill()


def command(environment: Path, *words: str) -> list[str]:
    return [str(environment / "env" / "bin" / "python"), "-P", "-m", *words]


def replay(environment: Path, *words: str) -> list[str]:
    # A chunk is stored in several pieces, and the pool is so small that the tier must serve hits.
    sizes = ["--slots", "40", "--chunk-bytes", "256KiB"]
    return command(environment, "kvtier_sdk.cli", "replay", "--json", *sizes, *words)


def test_the_tier_is_under_150_lines() -> None:
    tier = EXAMPLE / "kvtier_memcached" / "__init__.py"
    assert len(tier.read_text().splitlines()) < 150


def test_it_keeps_the_contract(environment: Path, wheels: Path) -> None:
    printed = run(command(environment, "pytest"), environment, stranger(wheels))
    assert " passed" in printed
    assert "failed" not in printed
    assert "no hook" not in printed


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_two_processes_share_what_is_in_two_servers(
    environment: Path, wheels: Path, make_server: Callable[..., Any], runner: str
) -> None:
    servers = [make_server(), make_server()]
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    url = f"memcached:?servers={places}&piece=100KiB&runner={runner}"

    def hit_rate() -> float:
        words = replay(environment, "--requests", "30", "--tier", url)
        report = json.loads(run(words, environment, stranger(wheels)))
        assert report["wrong_bytes"] == 0
        return float(report["hit_rate"])

    assert hit_rate() < 1
    assert hit_rate() == 1
    assert all(server.names() for server in servers)


#: A program that kills or freezes a server for a third of a replay, and prints the results.
DISTURBED = """
import json, logging, sys, threading
from memcached_server import MemcachedServer
from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import chat_workload, replay

disturbance, runner = sys.argv[1:]
back = threading.Event()


class Back(logging.Handler):
    def emit(self, record):
        if "writes are taken again" in record.getMessage():
            back.set()


logger = logging.getLogger("kvtier.tier.memcached")
logger.addHandler(Back())
logger.setLevel(logging.INFO)
server = MemcachedServer("-m", "256").start()
workload = chat_workload(150, 0)
entry = {
    "url": f"{server.url}?piece=100KiB&timeout=200ms&retries=0&runner={runner}",
    "probe_interval": 0.1,
    "max_probe_interval": 0.1,
}
config = TieringConfig.from_dict({"slots": 40, "chunk_bytes": 256 * 1024, "tiers": [entry]})


def disturb(done):
    if done == 50:
        server.kill() if disturbance == "killed" else server.pause()
    elif done == 100:
        server.start() if disturbance == "killed" else server.resume()
        assert back.wait(60), "the tier is not used again"


try:
    report = replay(workload, config, on_progress=disturb)
    names = len(server.names())
finally:
    server.kill()
tier = report.tiers[-1]
print(json.dumps({
    "wrong_bytes": report.wrong_bytes, "left_over": report.left_over, "failures": tier.failures,
    "hits": report.hit_chunks, "names": names,
}))
"""


@pytest.mark.parametrize("runner", ["thread", "process"])
@pytest.mark.parametrize("disturbance", ["killed", "frozen"])
def test_a_server_that_dies_or_hangs_in_a_replay_costs_hits_and_nothing_else(
    environment: Path, wheels: Path, runner: str, disturbance: str
) -> None:
    script = environment / "tests" / "disturbed.py"
    script.write_text(DISTURBED)
    python = str(environment / "env" / "bin" / "python")
    printed = run([python, str(script), disturbance, runner], environment, stranger(wheels))
    report = json.loads(printed.splitlines()[-1])
    assert report["wrong_bytes"] == 0
    assert report["failures"]
    assert report["hits"]
    assert report["names"], "chunks were stored since it came back"
    assert not any(report["left_over"].values()), report["left_over"]
