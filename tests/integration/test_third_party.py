"""A third party's package is found by its entry point, and its tier works."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from support.author import run

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


def result_of(code: str, site: Path) -> Any:
    code += "\nimport json\nprint(json.dumps(result))\n"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return json.loads(run([sys.executable, "-P", "-c", code], site, environment))


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
    assert result_of(code, third_party_site) == [[mine], False]


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
    *given, refusal = result_of(code, third_party_site)
    assert given == ["cold", "mine", {"path": "/x", "depth": 3}, 2.0]
    assert "unknown option 'pth'; did you mean 'path'?" in refusal


def test_it_moves_bytes(third_party_site: Path) -> None:
    assert result_of(ROUND_TRIP, third_party_site) == [
        [None, None],
        [True, False, True],
        ["NoneType", "ChunkNotFoundError"],
        True,
    ]
