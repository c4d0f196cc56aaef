"""The gather kernel, compiled by triton for devices that this machine lacks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from kvtier_sdk.worker import planning

pytest.importorskip("triton", reason="triton is not installed here: make test-kernel")

KERNEL = Path(planning.__file__).with_name("kernel.py")
#: Assembly patterns of a 16-byte load, a 16-byte store, and any store.
LOAD, STORE, ANY_STORE = r"ld\.global\S*\.v2\.b64", r"st\.global\S*\.v2\.b64", r"st\.global"


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("chip", [80, 90])
def test_pages_are_read_and_written_in_words_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chip: int,
    gather: bool,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # triton 3.9 warns if this variable is not set. The kernel does not depend on it.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Another test may have imported the module with TRITON_INTERPRET set, so load it again.
    module = runpy.run_path(str(KERNEL))
    kernel = module["_copy_pages"]
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"staging": "i64", "block_ids": "*i64", "table": "*i64"}
    types |= {"GATHER": "constexpr", "TILE": "constexpr"}
    constants = {"GATHER": gather, "TILE": module["_TILE_WORDS"]}
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in ("block_ids", "table")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32))
    assembly = compiled.asm["ptx"]
    assert re.search(LOAD, assembly)
    assert len(re.findall(STORE, assembly)) == len(re.findall(ANY_STORE, assembly)) > 0
