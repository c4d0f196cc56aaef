"""A third party's package is found by its entry point, or an error names it and its fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROUND_TRIP = """
import asyncio, logging
from kvtier_sdk import *

def transfer(key, fill):
    header, payload = bytearray([fill]) * 64, bytearray([fill]) * 256
    return Transfer(key, RequestContext("r"), memoryview(header), memoryview(payload))

async def main():
    spec = TierSpec.from_url("mine:")
    context = TierContext(
        name=spec.name, namespace=Namespace({"model": "m"}), chunk_bytes=256, header_bytes=64,
        payload_bytes=256, clock=SystemClock(), logger=logging.getLogger(),
        report_removed=lambda keys, *, evicted=False: None,
    )
    tier = spec.tier_class(spec.config, context)
    await tier.open()
    stored = await tier.store([transfer(b"a", 7), transfer(b"b", 8)])
    found = await tier.lookup([b"a", b"x", b"b"], RequestContext("r"))
    back = [transfer(b"b", 0), transfer(b"x", 0)]
    verdicts = [type(verdict).__name__ for verdict in await tier.load(back)]
    await tier.close()
    return [stored, found, verdicts, back[0].payload.tolist() == [8] * 256]

result = asyncio.run(main())
"""


def run(code: str, *sites: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sites))}
    code += "\nimport json\nprint(json.dumps(result))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def error_of_loading(name: str, *sites: Path) -> tuple[str, str]:
    code = f"""
import kvtier_sdk
try:
    result = ["", repr(kvtier_sdk.load_backend({name!r}))]
except Exception as error:
    result = [type(error).__name__, str(error)]
"""
    kind, text = run(code, *sites)
    return kind, text


def test_it_is_listed_without_being_imported(third_party_site: Path) -> None:
    code = """
import sys, dataclasses, kvtier_sdk
listed = [dataclasses.asdict(info) for info in kvtier_sdk.available_backends()]
result = [[info for info in listed if info["name"] == "mine"], "kvtier_mine" in sys.modules]
"""
    mine = {
        "name": "mine",
        "distribution": "kvtier-mine",
        "version": "1.2.3",
        "target": "kvtier_mine.tier:MineTier",
    }
    assert run(code, third_party_site) == [[mine], False]


def test_its_options_are_strict_and_can_be_given_in_a_url(third_party_site: Path) -> None:
    code = """
import kvtier_sdk
spec = kvtier_sdk.TierSpec.from_url("mine:?path=/x&depth=3&load_deadline=2s&name=cold")
result = [spec.name, spec.backend, spec.config.model_dump(), spec.runner.load_deadline_s]
try:
    kvtier_sdk.TierSpec.from_url("mine:?pth=/x")
except kvtier_sdk.ConfigError as error:
    result.append(str(error))
"""
    *given, refusal = run(code, third_party_site)
    assert given == ["cold", "mine", {"path": "/x", "depth": 3}, 2.0]
    assert "unknown option 'pth'; did you mean 'path'?" in refusal


def test_it_moves_bytes(third_party_site: Path) -> None:
    assert run(ROUND_TRIP, third_party_site) == [
        [None, None],
        [True, False, True],
        ["NoneType", "ChunkNotFoundError"],
        True,
    ]


def test_a_name_of_two_distributions_is_refused_naming_both(
    third_party_site: Path, duplicate_site: Path
) -> None:
    kind, text = error_of_loading("mine", third_party_site, duplicate_site)
    assert kind == "DuplicateBackendError"
    assert "kvtier-mine 1.2.3 and kvtier-mine-too 0.4.0" in text
    # The other names are not hurt.
    kind, text = error_of_loading("memory", third_party_site, duplicate_site)
    assert (kind, "MemoryTier" in text) == ("", True)


def test_an_unknown_name_lists_the_installed_and_the_closest(third_party_site: Path) -> None:
    kind, text = error_of_loading("mines", third_party_site)
    assert kind == "UnknownBackendError"
    assert text.startswith("no backend 'mines'; did you mean 'mine'? installed: ")
    assert {"memory", "mine"} <= set(text.partition("installed: ")[2].split(", "))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "cannot be imported: RuntimeError: no such driver"),
        ("stranger", "is not a subclass of kvtier_sdk.SecondaryTierManager"),
        ("newer", "it declares contract_version 2"),
    ],
)
def test_a_backend_that_cannot_be_used_is_named_with_its_version(
    faulty_site: Path, name: str, reason: str
) -> None:
    kind, text = error_of_loading(name, faulty_site)
    assert kind == "BackendLoadError"
    assert text.startswith(f"backend '{name}' of kvtier-faulty 0.0.7")
    assert reason in text
