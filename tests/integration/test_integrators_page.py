"""The code on the page for integrators runs; only the tier's address is replaced."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from support.author import ROOT, run
from support.public import exported_by

import kvtier_sdk
import kvtier_sdk.engine
from kvtier_sdk import HostPool, Namespace, PoolLayout, RequestContext, make_offload_key

PAGE = (ROOT / "docs" / "integrators.md").read_text()
CODE = r"```python\n(.*?)^```"
EXCERPTS = re.findall(rf"^<!-- of: (\S+) -->\n\n{CODE}", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [
    block
    for block in re.findall(rf"^{CODE}", PAGE, re.MULTILINE | re.DOTALL)
    if block not in dict(EXCERPTS).values()
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = block.replace("file:///data/kv", f"file://{tmp_path}/kv")
    block = block.replace("redis://cache:6379/0", f"file://{tmp_path}/kv")
    pool = HostPool.create(PoolLayout(4, 4096))
    known = {
        "pool": pool,
        "namespace": Namespace({"model": "m"}),
        "keys": [make_offload_key(bytes([n]) * 32) for n in range(2)],
        "slots": [0, 1],
        "request": RequestContext("r"),
    }
    exec(block, known)
    pool.close()
    for said in re.findall(r"print\(.*\)  # (.*?)(?: \.\.\.)?$", block, re.MULTILINE):
        assert capsys.readouterr().out.startswith(said)


def lines_of(code: str) -> str:
    """Return the code without indentation, because the page shows a method without its class."""
    return "\n".join(filter(None, map(str.strip, code.splitlines())))


def test_an_excerpt_is_in_its_example() -> None:
    assert EXCERPTS
    for file, excerpt in EXCERPTS:
        assert lines_of(excerpt) in lines_of((ROOT / file).read_text())


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```sh\n(python .*)\n```", PAGE, re.MULTILINE)
    (printed,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    _, *arguments = shlex.split(command.replace("file:///tmp/kv", f"file://{tmp_path}/kv"))
    assert run([sys.executable, *arguments], ROOT) == printed


def test_every_name_on_the_page_is_public() -> None:
    public = {*exported_by(kvtier_sdk), *exported_by(kvtier_sdk.engine)}
    assert set(re.findall(r"`([A-Z][a-z]\w+)[`(.]", PAGE)) - public == {"None"}
