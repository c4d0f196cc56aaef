"""The code on the page for integrators works as it stands, but for the place of the tier."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier_sdk import HostPool, Namespace, PoolLayout, RequestContext, make_offload_key

PAGE = (Path(__file__).parents[2] / "docs" / "integrators.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["our manager", "a tier alone"])
def test_a_block_runs(block: str, tmp_path: Path) -> None:
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
