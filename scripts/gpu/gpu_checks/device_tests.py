"""The project's own tests of the worker on a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_checks.accelerator import need_device
from gpu_checks.findings import Findings

TESTS = Path(__file__).resolve().parents[1] / "tests"


class _Counter:
    """A counter of test outcomes; pytest calls its methods."""

    def __init__(self) -> None:
        self.passed = 0
        self.skipped = 0
        self.failed: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid}\n{report.longreprtext}")
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1


def check(findings: Findings) -> None:
    """Run the tests with the bundled plugins only: the machine's own may not fit."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-q", "-rs", "--import-mode=importlib"]
    for plugin in ("no:cacheprovider", "pytest_asyncio.plugin"):
        options += ["-p", plugin]
    for setting in ("markers=gpu", "asyncio_default_fixture_loop_scope=function"):
        options += ["-o", setting]
    # The folder may lie in a checkout, whose conftest.py needs more than the bundle has.
    where = ["-c", os.devnull, "--rootdir", str(TESTS), "--confcutdir", str(TESTS), str(TESTS)]
    counter = _Counter()
    status = pytest.main([*options, *where], plugins=[counter])
    findings.figure("tests passed", counter.passed)
    findings.figure("tests skipped", counter.skipped)
    for failure in counter.failed:
        findings.expect(False, failure)
    findings.expect(not status, f"pytest ended with status {int(status)}")
    need_device("tests/gpu")
    findings.expect(counter.passed and not counter.skipped, "tests were skipped, or there are none")
