from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.live import live
from support.monitoring import ALERT_RULES, ALERTS, DASHBOARD
from support.runners import KEYS
from support.server import ServerProcess, free_port

pytestmark = pytest.mark.reader

_UNPACKED = Path(__file__).parents[2] / ".prometheus" / "usr" / "bin"
_PATIENCE_S = 30.0
_CONFIG = """
global: {{scrape_interval: 300ms, scrape_timeout: 300ms, evaluation_interval: 300ms}}
scrape_configs:
- job_name: kvtier
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=_UNPACKED)
    assert found is not None, f"{name} is missing: try 'make prometheus'"
    return found


def check_rules(path: Path) -> str:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def play_rules(path: Path) -> str:
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(path)], capture_output=True, text=True
    )
    return done.stdout + done.stderr


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=10) as reply:
            return json.load(reply)["data"]

    def answers(self) -> bool:
        with suppress(OSError):
            self.get("alerts")
            return True
        return False

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, f"waited in vain until {what}"
            time.sleep(0.1)


@contextmanager
def prometheus(directory: Path, *, target_port: int) -> Iterator[Prometheus]:
    config, port = directory / "config.yml", free_port()
    config.write_text(_CONFIG.format(port=target_port))
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = ServerProcess(directory / "log")
    process.launch(*command)
    try:
        server = Prometheus(port)
        process.wait_until(server.answers, "prometheus answers")
        yield server
    finally:
        process.kill()


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(ALERT_RULES)
    assert f"SUCCESS: {len(ALERTS)} rules found" in check_rules(path)


#: For each alert, the minute at which it fires, and the series that cause the alert. Each series
#: has a value for every minute.
TROUBLE: dict[str, tuple[int, dict[str, str]]] = {
    "KVTierReadsSuspended": (10, {"read_breaker_open{tier='far'}": "1x60"}),
    "KVTierStoresSuspended": (10, {"store_breaker_open{tier='far'}": "1x60"}),
    "KVTierSlow": (10, {"tier_slow{tier='far'}": "1x60"}),
    "KVTierErrors": (
        20,
        {"failed_chunks_total{tier='far',operation='load',reason='timeout'}": "0+5x60"},
    ),
    "KVTierDamagedChunks": (
        45,
        {"failed_chunks_total{tier='far',operation='load',reason='corrupt'}": "0x39 1x21"},
    ),
    "KVTierHitRateCollapsed": (
        1500,
        {
            "hit_chunks_total{tier='host'}": "0+90x1440 129600+10x60",
            "misses_total{tier='host',reason='absent'}": "0+10x1440 14400+90x60",
        },
    ),
    "KVTierPoolFull": (10, {"pool_pinned_slots": "95x60"}),
    "KVTierQueueFull": (
        45,
        {"dropped_chunks_total{tier='far',operation='store',reason='queue_full'}": "0+20x60"},
    ),
    "KVTierEvictedUnread": (150, {"evicted_unread_chunks_total{tier='far'}": "0+90x180"}),
    "KVTierSelective": (150, {"tier_selective{tier='far'}": "1x180"}),
    "KVTierProcessRestarts": (30, {"process_restarts_total{tier='far'}": "0x20 5x40"}),
    "KVTierNotOpen": (
        10,
        {"tier_open{tier='far'}": "0x60", "read_breaker_open{tier='far'}": "1x60"},
    ),
}
HEALTHY = {
    "tier_open{tier='far'}": "1x1500",
    "tier_selective{tier='far'}": "0x1500",
    "read_breaker_open{tier='far'}": "0x1500",
    "store_breaker_open{tier='far'}": "0x1500",
    "tier_slow{tier='far'}": "0x1500",
    "failed_chunks_total{tier='far',operation='load',reason='timeout'}": "0+0.5x1500",
    "failed_chunks_total{tier='far',operation='load',reason='corrupt'}": "0x1500",
    "failed_chunks_total{tier='far',operation='load',reason='not_found'}": "0+50x1500",
    "job_chunks_sum{tier='far',operation='load'}": "0+100x1500",
    "hit_chunks_total{tier='host'}": "0+90x1500",
    "hit_chunks_total{tier='far'}": "0+5x1500",
    "misses_total{tier='host',reason='absent'}": "0+10x1500",
    "pool_slots": "100x1500",
    "pool_pinned_slots": "10x1500",
    "pool_writing_slots": "1x1500",
    "pool_loading_slots": "1x1500",
    "pool_quarantined_slots": "0x1500",
    "dropped_chunks_total{tier='far',operation='store',reason='queue_full'}": "0+1x1500",
    "stored_chunks_total{tier='far'}": "0+100x1500",
    "evicted_unread_chunks_total{tier='far'}": "0+20x1500",
    "evicted_chunks_total{tier='far'}": "0+100x1500",
    "process_restarts_total{tier='far'}": "0x500 1x1000",
}


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_fires_in_its_trouble_and_no_other_does(tmp_path: Path, alert: str) -> None:
    minute, trouble = TROUBLE[alert]
    assert firing_at(tmp_path, minute, HEALTHY | trouble) == {alert}


def test_no_alert_fires_in_good_times(tmp_path: Path) -> None:
    assert firing_at(tmp_path, 1500, HEALTHY) == set()


def firing_at(directory: Path, minute: int, series: dict[str, str]) -> set[str]:
    rules, script = directory / "rules.yml", directory / "test.yml"
    rules.write_text(ALERT_RULES)
    played = [{"series": f"kvtier_{name}", "values": values} for name, values in series.items()]
    wanted = {"expr": "ALERTS{alertstate='firing'}", "eval_time": f"{minute}m", "exp_samples": []}
    test = {"interval": "1m", "input_series": played, "promql_expr_test": [wanted]}
    script.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]})
    )
    # The script expects no alert, so promtool fails and lists the alerts that fire.
    said = play_rules(script)
    firing = set(re.findall(r'alertname=\\?"(\w+)', said.partition("got:")[2]))
    assert firing or "SUCCESS" in said, said
    return firing


def test_each_expression_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD)["panels"]
    port, facts = free_port(), {"model": "m", "tokens_per_chunk": 16}
    (tmp_path / "prometheus").mkdir()
    with (
        live(["memory:?name=far"], metrics_port=port, namespace={**facts}) as engine,
        prometheus(tmp_path / "prometheus", target_port=port) as seen,
    ):
        engine.manager.stats[0].recompute_s = 0.1
        engine.there_and_back(engine.begin("first"), *KEYS[:8])
        for panel in panels:
            for target in panel["targets"]:
                # Remove the condition that hides zeros, because nothing has failed.
                asked = target["expr"].replace("$instance", ".*").removesuffix(" > 0")
                query = quote(re.sub(r"\$__\w+", "1m", asked))
                seen.wait_until(
                    lambda query=query: seen.get(f"query?query={query}")["result"], asked
                )
        (saved,) = seen.get("query?query=kvtier_saved_tokens_total{tier='host'}")["result"]
        assert (saved["metric"]["model"], saved["value"][1]) == ("m", "128")
