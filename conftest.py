"""Configures Hypothesis for all tests, and checks that they leave the checkout clean.

Examples have no deadline, because the machine may be busy. Hypothesis tries the same examples in
each run, so that only a changed file can cause a new failure. ``make search`` tries other examples,
and more of them.
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    max_examples=30,
)
settings.register_profile(
    "search", settings.get_profile("steady"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

#: Tools' caches, environments, the built site and release. These may appear while tests run.
_CACHES = re.compile(r"\.git$|\.venv|\.\w+_cache$|\.hypothesis$|__pycache__$|site$|dist$")
_BEFORE = pytest.StashKey[set[str]]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_BEFORE] = _names(session.config.rootpath)


def pytest_collection_finish() -> None:
    """Exclude the collected tests from later garbage collections, which then take less time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test has left a file or a directory, even an empty directory."""
    if (before := session.config.stash.get(_BEFORE, None)) is not None:
        left = sorted(_names(session.config.rootpath) - before)
        session.config.stash[_LEFT] = left
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name in config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"left behind in the checkout: {name}", red=True)


def _names(root: Path) -> set[str]:
    """Return the paths of all files and directories in the checkout, except caches."""
    found = set()
    for place, directories, files in os.walk(root):
        directories[:] = [name for name in directories if not _CACHES.match(name)]
        found |= {os.path.relpath(os.path.join(place, name), root) for name in directories + files}
    return found
