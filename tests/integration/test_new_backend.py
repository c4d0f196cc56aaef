from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from support.author import run, stranger
from support.command import kvtier

from kvtier_sdk import CONTRACT_VERSION, __version__

pytestmark = pytest.mark.reader

LONGEST = "abcdefghijklmno-pqrstuvwxyz012"


def new_backend(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return kvtier("new-backend", *words, cwd=directory)


def written(name: str, directory: Path) -> Path:
    done = new_backend(name, directory=directory)
    assert (done.returncode, done.stderr) == (0, "")
    (project,) = directory.iterdir()
    return project


def test_a_newcomer_does_what_he_is_told_and_edits_nothing(wheels: Path, tmp_path: Path) -> None:
    environment = stranger(wheels)
    command = new_backend("demo", directory=tmp_path).stdout.splitlines()[-1].strip()
    told = distribution("kvtier-sdk").read_text("direct_url.json")
    if told is not None:
        source = url2pathname(urlsplit(json.loads(told)["url"]).path)
        assert command.endswith(f"make test PIP_OPTIONS={source}")
        del environment["PIP_OPTIONS"]
    printed = run(command, tmp_path, environment)
    assert re.search(r"^\d+ passed", printed, re.MULTILINE), printed
    skipped = re.findall(r"^SKIPPED.*?: (.*)$", printed, re.MULTILINE)
    assert all(re.match(r"no hook|capability \w+ is not declared", why) for why in skipped)
    listed = run(
        [
            str(tmp_path / "kvtier-demo/.venv/bin/python"),
            "-c",
            "import kvtier_sdk as kv; "
            "print([info.name for info in kv.available_backends()], kv.load_backend('demo'))",
        ],
        tmp_path,
        environment,
    )
    assert listed == "['demo', 'memory'] <class 'kvtier_demo.tier.DemoTier'>\n"


@pytest.mark.parametrize(
    ("name", "called", "package", "tier"),
    [
        ("demo", "kvtier-demo", "kvtier_demo", "DemoTier"),
        ("my_store2", "kvtier-my-store2", "kvtier_my_store2", "MyStore2Tier"),
        (LONGEST, f"kvtier-{LONGEST}", f"kvtier_{LONGEST.replace('-', '_')}", ""),
    ],
)
def test_the_package_is_called_after_the_backend(
    tmp_path: Path, name: str, called: str, package: str, tier: str
) -> None:
    project = written(name, tmp_path)
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert (project.name, metadata["name"]) == (called, called)
    (target,) = metadata["entry-points"]["kvtier.backends"].values()
    assert target.startswith(f"{package}:{tier}")
    (needed,) = metadata["dependencies"]
    assert needed == "kvtier-sdk>=0.1,<0.2"
    assert __version__.startswith("0.1.")
    assert f"contract_version = {CONTRACT_VERSION}\n" in (project / package / "tier.py").read_text()
    assert (project / package / "py.typed").exists()
    for path in project.rglob("*"):
        assert path.is_dir() or not re.search("@[A-Z]+@", path.read_text())


@pytest.mark.parametrize("name", ["demo", LONGEST])
def test_what_is_written_passes_its_own_checks(tmp_path: Path, name: str) -> None:
    project = written(name, tmp_path)
    ruff = str(Path(sys.executable).with_name("ruff"))
    run([ruff, "check", "."], project)
    run([ruff, "format", "--check", "."], project)
    run([sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")], project)


#: A tier that never closes its socket, and its conformance tests.
_FORGETS_A_SOCKET = """
import socket

from kvtier_demo import DemoTier, DemoTierConfig


class Forgets(DemoTier):
    async def open(self):
        await super().open()
        self._socket = socket.socket()


class TestForgets(TestDemoTier):
    @pytest.fixture
    def tier(self, tmp_path):
        options = RunnerOptions.model_validate({})
        self.root = tmp_path / "kv"
        return TierSpec("demo", "demo", Forgets, DemoTierConfig(root=str(self.root)), options)

    def bad_settings(self):
        return {}
"""


def test_a_socket_left_to_the_collector_is_a_warning_and_no_crash(tmp_path: Path) -> None:
    project = written("demo", tmp_path)
    tests = project / "tests" / "test_conformance.py"
    imports = "\nfrom kvtier_sdk import RunnerOptions, TierSpec\n"
    tests.write_text(tests.read_text() + imports + _FORGETS_A_SOCKET)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", "TestForgets", "--tb=line"]
    printed = run(command, project, {**os.environ, "PYTHONPATH": str(project)})
    assert re.search(r"^\d+ passed, .* warnings", printed, re.MULTILINE), printed
    assert "ResourceWarning: unclosed <socket.socket" in printed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Demo", "lowercase letters and digits"),
        ("2go", "a letter first"),
        ("a--b", "between"),
        ("../demo", "lowercase letters"),
        ("", "lowercase letters"),
        (f"{LONGEST}3", "up to 30 lowercase letters"),
        ("kvtier-demo", "leave out 'kvtier-'"),
        ("kvtier", "is taken: in a tier's 'type' it stands"),
        ("sdk", "is taken: kvtier-sdk 0.1.0 is installed"),
        ("file", "is taken: kvtier-file 0.1.0 provides the backend 'file'"),
        ("rediss", "is taken: kvtier-redis 0.1.0 provides the backend 'redis'"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str, said: str) -> None:
    done = new_backend(name, directory=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvtier: NAME {name!r}")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvtier-demo").mkdir()
    done = new_backend("demo", directory=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "kvtier: kvtier-demo exists already; choose another NAME\n"
    assert list((tmp_path / "kvtier-demo").iterdir()) == []


def test_a_directory_that_takes_no_package_is_named() -> None:
    done = new_backend("demo", directory=Path("/proc"))
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: kvtier-demo")
