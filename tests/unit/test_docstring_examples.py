from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.public import exported_by

import kvtier_sdk
import kvtier_sdk.engine
from kvtier_sdk.testing import CHECKS, CheckSkipped, TierSubject
from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import REQUEST
from kvtier_sdk.testing.conformance.rules import run_check

SDK = {
    name: getattr(module, name)
    for module in (kvtier_sdk, kvtier_sdk.engine)
    for name in exported_by(module)
}
DOCUMENTED = {**SDK, "Clock.gather_bounded": kvtier_sdk.Clock.gather_bounded}
PROSE = {name: f"{inspect.getdoc(found)}\n" for name, found in DOCUMENTED.items()}
BLOCKS = {name: re.findall(r"::\n\n((?:    .*\n|\n)+)", text) for name, text in PROSE.items()}
IMPORTS = "import itertools, os, tempfile, uuid\nfrom pathlib import Path\n"
#: Examples that are only compiled, because they need a server with its own protocol.
NEED_A_SERVER = {"Connection", "ConnectionPool"}


def run(name: str, **given: Any) -> dict[str, Any]:
    names = {**SDK, **given}
    text = IMPORTS + textwrap.dedent("\n".join(BLOCKS[name]))
    # Replace the URL, because no Redis server runs here.
    text = text.replace("redis://cache/0", "memory:")
    code = compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    awaited = None if name in NEED_A_SERVER else eval(code, names)
    if awaited is not None:
        asyncio.run(awaited)
    return names


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if blocks])
def test_a_block_of_code_runs(name: str, tmp_path: Path) -> None:
    path, key = tmp_path / "object", kvtier_sdk.make_offload_key(bytes(32))
    path.write_bytes(b"content")
    subject = TierSubject("memory:")
    context = subject.context()
    lent = LentBuffers(subject.memory, key, REQUEST, context, object_bytes=context.object_bytes)

    async def contains_chunk(key: bytes) -> bool:
        return True

    async def store_chunk(transfer: kvtier_sdk.Transfer) -> None:
        pass

    tier = SimpleNamespace(contains_chunk=contains_chunk, store_chunk=store_chunk)
    given = {"context": context, "clock": context.clock, "key": key, "keys": [key], "tier": tier}
    given |= {"namespace": context.namespace, "pool": kvtier_sdk.HostPool(4, 4096), "slot": 0}
    run(name, path=path, root=tmp_path, transfer=lent.transfer, **given)
    given["pool"].close()


def test_the_tier_among_them_keeps_the_contract() -> None:
    # Skip the checks that start a process, because the process cannot import the class.
    for check in [one for one in CHECKS.values() if "process" not in one.name]:
        with contextlib.suppress(CheckSkipped):
            run_check(check, TierSubject(run("SecondaryTierManager")["DictionaryTier"]))


@pytest.mark.parametrize("name", [name for name, text in PROSE.items() if ">>>" in text])
def test_a_session_prints_what_it_shows(name: str) -> None:
    session = doctest.DocTestParser().get_doctest(PROSE[name], dict(SDK), name, None, 0)
    assert doctest.DocTestRunner().run(session).failed == 0
