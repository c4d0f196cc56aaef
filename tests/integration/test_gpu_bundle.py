"""The bundle for a machine with a GPU: made here, and run without a device."""

from __future__ import annotations

import json
import os
import re
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


def test_it_says_which_checks_want_a_device(bundle: Path, tmp_path: Path) -> None:
    ran = start(bundle / "run.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = results(tmp_path)
    assert len(found) == 12
    assert {check["status"] for check in found.values()} == {"wanted a device"}
    assert all(check["wanted"] for check in found.values())
    # The parts that need no device were done, with the packages in the folder.
    figures = {figure["name"]: figure for figure in found["round_trip"]["figures"]}
    assert figures["file tier in a process: bytes compared"]["value"] == 4
    assert figures["file tier in a process: bytes compared"]["unit"] == "MiB"
    last = (tmp_path / "report.txt").read_text().splitlines()[-1]
    assert last == f"12 wanted a device: {', '.join(found)}"
    assert last in ran.stdout


def test_a_check_that_fails_is_told_and_the_next_one_runs(bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    bugs = {
        "registration": "findings.expect(1 > 2, 'a figure is wrong')",
        "batch": "raise ZeroDivisionError('on purpose')",
        "seam": "os.kill(os.getpid(), 11)",
        "streams": "findings.figure('seen', 5, 'ms'); os.system('sleep 60')",
    }
    for name, bug in bugs.items():
        body = f"import os\n\ndef check(findings):\n    {bug}\n"
        (broken / "gpu_checks" / f"{name}.py").write_text(body)
    table = broken / "gpu_checks/__init__.py"
    patient = table.read_text()
    hasty = re.sub(r'("streams", .*), \d+\)', r"\1, 1)", patient)
    assert hasty != patient
    table.write_text(hasty)
    ran = start(broken / "run.py", "--only", ",".join(["machine", *bugs]), cwd=tmp_path)
    assert ran.returncode == 1
    found = results(tmp_path)
    failures = {name: "\n".join(check["failures"]) for name, check in found.items()}
    assert found["machine"]["status"] == "wanted a device"
    assert failures["registration"] == "a figure is wrong"
    assert "ZeroDivisionError: on purpose" in failures["batch"]
    assert failures["streams"] == "was ended after 1 s"
    assert found["streams"]["figures"] == [{"name": "seen", "value": 5, "unit": "ms"}]
    assert failures["seam"] == "its process died: SIGSEGV"
    assert " 4 failed: registration, batch, streams, seam\n" in ran.stdout


def test_a_check_that_no_time_is_left_for_has_failed(bundle: Path, tmp_path: Path) -> None:
    ran = start(bundle / "run.py", "--limit-s", "0", "--only", "machine", cwd=tmp_path)
    assert ran.returncode == 1
    assert results(tmp_path)["machine"]["failures"] == ["no time was left of 0 s"]


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
