"""``tests/wheels.py`` finds faults in a wheel's contents."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "wheels.py"
GOOD = ("mine/__init__.py", "mine/py.typed", "mine-1.dist-info/licenses/LICENSE")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (GOOD, []),
        ((*GOOD, "mine__mypyc.cpython-311-x86_64-linux-gnu.so", "mine/a/_planes.abi3.so"), []),
        ((*GOOD, "mine__mypyc.cpython-311-x86_64-linux-gnu.so"), ["holds no compiled coder"]),
        (GOOD[:2], ["holds no LICENSE"]),
        (GOOD[1:], ["lacks mine/__init__.py"]),
        ((*GOOD[::2], "mine/sub/py.typed"), ["holds no py.typed"]),
        ((*GOOD, "mine/tests/test_x.py"), ["holds mine/tests/test_x.py, a test"]),
        ((*GOOD, "mine/testing/kit.py"), []),
        ((*GOOD, "mine/conftest.py"), ["holds mine/conftest.py, a test"]),
        ((*GOOD, "docs/x.md"), ["holds more than one package: docs, mine, mine-1.dist-info"]),
    ],
)
def test_a_faulty_wheel_is_seen(
    script: ModuleType, tmp_path: Path, names: tuple[str, ...], faults: list[str]
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("__init__.py", "_part.c"):
        (tmp_path / "mine" / name).touch()
    wheel = tmp_path / "mine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    assert script.faults_of(wheel, tmp_path / "mine") == [
        f"{wheel.name}: {fault}" for fault in faults
    ]
