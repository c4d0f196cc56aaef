from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.public import exported_by

pytestmark = pytest.mark.reader

TIERS = Path(__file__).parents[1] / "typing" / "tiers.py"


def test_wrong_signatures_are_refused_and_right_ones_are_not(tmp_path: Path) -> None:
    options = ["--strict", "--config-file=", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(TIERS)],
        cwd=TIERS.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"tiers\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert {(int(line), code) for line, code in found} == marked(), done.stdout


def marked() -> set[tuple[int, str]]:
    lines = enumerate(TIERS.read_text().splitlines(), 1)
    wanted = ((number, re.search(r"# E: ([\w-]+)$", line)) for number, line in lines)
    return {(number, found[1]) for number, found in wanted if found}


def test_every_public_type_is_known(tmp_path: Path) -> None:
    beside = Path(sys.executable).parent
    done = subprocess.run(
        [
            beside / "basedpyright",
            "--verifytypes",
            "kvtier_sdk",
            "--ignoreexternal",
            "--outputjson",
        ],
        cwd=tmp_path,
        # Put this Python first, because pyright uses the packages of the first Python on the path.
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = public_homes()
    assert public <= {symbol["name"] for symbol in symbols}
    assert [told for symbol in symbols for told in complaints(symbol, public)] == []


def public_homes() -> set[str]:
    modules = map(
        importlib.import_module, ["kvtier_sdk", "kvtier_sdk.testing", "kvtier_sdk.worker"]
    )
    things = [getattr(module, name) for module in modules for name in exported_by(module)]
    return {
        f"{thing.__module__}.{thing.__qualname__}"
        for thing in things
        if getattr(thing, "__module__", "").startswith("kvtier_sdk") and callable(thing)
    }


def complaints(symbol: dict[str, Any], public: set[str]) -> list[str]:
    name = symbol["name"]
    if symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]:
        return []
    if not any(name == home or name.startswith(f"{home}.") for home in public):
        return []
    return [f"{name}: {diagnostic['message']}" for diagnostic in symbol["diagnostics"]]
