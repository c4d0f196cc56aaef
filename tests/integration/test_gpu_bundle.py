"""The bundle of GPU tests can be built and run on a machine without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.reader

BUILDER = Path(__file__).parents[2] / "scripts/gpu_bundle.py"
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def start(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def results(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text())
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    built = start(BUILDER, "--no-wheels", folder, cwd=folder.parent)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_checks_run_from_the_folder_and_skip_what_wants_a_device(
    bundle: Path, tmp_path: Path
) -> None:
    names = "machine,batch,worker,seam,expedited,capture,dropped,round_trip"
    ran = start(bundle / "run.py", "--only", names, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = results(tmp_path)
    assert ",".join(found) == names
    figures = found["round_trip"]["figures"]
    assert figures["file tier in a process: bytes compared"] == "4 MiB"
    assert "no CUDA device" in found["worker"]["output"]
    assert (tmp_path / "report.txt").read_text().endswith("\n8 passed\n0 failed\n")
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.txt"}


def test_a_check_that_fails_is_told_and_the_next_one_runs(bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    bugs = {
        "batch": "assert 1 > 2, 'a figure is wrong'",
        "seam": "os.kill(os.getpid(), 11)",
        "streams": "figure('seen', 5, 'ms'); os.system('sleep 60')",
    }
    for name, bug in bugs.items():
        body = f"import os\n\ndef test_{name}(figure):\n    {bug}\n"
        (broken / "tests/gpu" / f"test_{name}.py").write_text(body)
    program = broken / "run.py"
    patient = program.read_text()
    program.write_text(patient.replace('"streams": 45', '"streams": 5'))
    ran = start(program, "--only", ",".join([*bugs, "machine"]), cwd=tmp_path)
    assert ran.returncode == 1
    found = results(tmp_path)
    assert "a figure is wrong" in found["batch"]["output"]
    assert found["batch"]["fault"] == "ended with status 1"
    assert found["seam"]["fault"] == "ended with status -11"
    assert found["streams"]["fault"] == "was ended after 5 s"
    assert "5 ms" in found["streams"]["output"]
    assert found["machine"]["fault"] == ""
    assert "3 failed: batch, seam, streams\n" in ran.stdout


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path) -> None:
    program = f"import sys; sys.path[0] = {str(BUILDER.parent)!r}; import gpu_bundle as g; "
    program += "g.MAX_BYTES = 1000; g.main()"
    built = start("-c", program, "--no-wheels", tmp_path / "bundle", cwd=tmp_path)
    assert built.returncode == 1
    assert "that is more than" in built.stderr


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("work")
    built = start(BUILDER, "--no-wheels", tmp_path, cwd=tmp_path)
    assert built.returncode == 1
    assert "holds something else" in built.stderr
    assert (tmp_path / "precious").read_text() == "work"
