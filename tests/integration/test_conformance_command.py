from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.redis_server import Server

from kvtier_sdk.testing import CHECKS, Hook

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "third-party.md").read_text()
sys.path.append(str(ROOT / "scripts"))


def test_the_command_of_the_page_writes_the_record_of_the_page(tmp_path: Path) -> None:
    (line,) = re.findall(r"```sh\n(.*?)\n```", PAGE)
    program, *words = shlex.split(line)
    assert program == "kvtier"
    done = kvtier(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"try", "record.json"}
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record) == re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.M)))
    assert (record["backend"], record["package"]) == ("file", "kvtier-file")
    assert (record["version"], record["kvtier_sdk"]) == (
        version("kvtier-file"),
        version("kvtier-sdk"),
    )
    rules = record["rules"]
    assert list(rules) == [*CHECKS, "tier_state_machine"]
    assert rules["check_what_is_stored_comes_back"] == "passed"
    assert rules["check_an_outage_is_no_miss"] == "skipped: no hook: break_connection"
    passed = sum(result == "passed" for result in rules.values())
    assert record["summary"] == f"{passed} passed, 0 failed, {len(rules) - passed} skipped"
    lines = done.stdout.splitlines()
    assert lines[0] == f"passed   {CHECKS['check_what_is_stored_comes_back'].rule}"
    assert lines[-1] == f"kvtier-file {version('kvtier-file')}: {record['summary']}"


def test_the_table_of_the_page_has_the_records() -> None:
    import third_party

    assert third_party.page() == PAGE, "run python scripts/third_party.py"


LEAKY = """
from kvtier_sdk import ChunkTierManager, TierConfig

class Config(TierConfig):
    password: str

class Tier(ChunkTierManager):
    config_model = Config
    contract_version = 1
    async def contains_chunk(self, key): return False
    async def store_chunk(self, transfer): pass
    async def load_chunk(self, transfer): raise LookupError(f"no {self.config.password}")
"""


def test_a_broken_rule_is_shown_without_secrets(install_package: Any, tmp_path: Path) -> None:
    site = install_package("kvtier-leaky", "0.3", {"tier": LEAKY}, {"leaky": "tier:Tier"})
    words = ["conformance", "leaky", "--option", "password=hunter2", "--json", "record.json"]
    done = kvtier(*words, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 1
    check = CHECKS["check_absent_is_not_found"]
    assert f"failed   {check.rule}\n  found: " in done.stdout
    assert f'contract: "{check.says}"' in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    assert re.match("failed: found: .*LookupError: no \\*\\*\\*", record["rules"][check.name])
    assert "hunter2" not in done.stdout + done.stderr + json.dumps(record)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["redis://127.0.0.1:1"], 1, "no connection to 127.0.0.1:1"),
        (["file", "--option", "root"], 2, "'root' should be OPTION=VALUE"),
        (["fiel"], 2, "did you mean 'file'?"),
    ],
)
def test_what_hinders_every_rule_ends_the_command(words: list[str], status: int, said: str) -> None:
    done = kvtier("conformance", *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


OUTAGES = [
    name for name, check in CHECKS.items() if {Hook.BREAK_CONNECTION, Hook.FREEZE} & {*check.needs}
]


def test_outages_are_checked_through_a_proxy(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        words = ["conformance", server.url, "--outages", f"127.0.0.1:{server.port}"]
        done = kvtier(*words, "--json", "record.json", cwd=tmp_path)
    finally:
        server.kill()
    rules = json.loads((tmp_path / "record.json").read_text())["rules"]
    assert len(OUTAGES) == 5
    assert {rules[name] for name in OUTAGES} == {"passed"}, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("6379", "write the store's HOST:PORT"),
        ("cache:redis", "write the store's HOST:PORT"),
        ("other:6379", "no option contains the address other:6379"),
        ("cache:637", "no option contains the address cache:637"),
        ("ache:6379", "no option contains the address ache:6379"),
    ],
)
def test_an_address_that_no_proxy_can_replace_is_refused(address: str, message: str) -> None:
    done = kvtier("conformance", "redis://cache:6379", "--outages", address)
    assert done.returncode == 2
    assert message in done.stderr
