"""The gather kernel, compiled by triton for devices that this machine lacks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from kvtier_sdk.worker import planning

pytest.importorskip("triton", reason="triton is not installed here: make test-kernel")

KERNEL = Path(planning.__file__).with_name("kernel.py")
#: Assembly patterns for each runtime: a 16-byte load, a 16-byte store, and any store.
ACCESSES = {
    "cuda": (r"ld\.global\S*\.v2\.b64", r"st\.global\S*\.v2\.b64", r"st\.global"),
    "hip": (r"_load_dwordx4", r"_store_dwordx4", r"(global|buffer)_store_"),
}


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("vendor", "chip", "lanes"),
    [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx90a", 64), ("hip", "gfx942", 64)],
)
def test_pages_are_read_and_written_in_words_of_16_bytes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    vendor: str,
    chip: int | str,
    lanes: int,
    gather: bool,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Set this because triton 3.9 warns otherwise; the kernel does not depend on it.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Another test can have imported the module with TRITON_INTERPRET set, so load it anew.
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
    compiled = triton.compile(source, target=GPUTarget(vendor, chip, lanes))
    assembly = compiled.asm["ptx" if vendor == "cuda" else "amdgcn"]
    load, store, any_store = ACCESSES[vendor]
    assert re.search(load, assembly)
    assert len(re.findall(store, assembly)) == len(re.findall(any_store, assembly)) > 0
