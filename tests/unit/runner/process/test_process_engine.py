"""An engine beside a tier's process: wake-ups, priority and death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.runners import Make, Rig
from support.tier_process import LookClock, is_there, pid_of

from kvtier_sdk.runner.jobs import Operation

TESTS = Path(__file__).parents[3]


def test_no_thread_of_the_engines_is_woken_up_for_a_job(tmp_path: Path) -> None:
    rig = Rig("process", tmp_path, clock=LookClock(), notifies=False)
    rig.client.open()
    try:
        (thread,) = (t for t in threading.enumerate() if t.name == "kvtier-held")
        status = Path(f"/proc/self/task/{thread.native_id}/status")
        settled(status)
        before = switches(status)
        for chunk in range(8):
            rig.submit([rig.job(Operation.STORE, chunk)])
            while len(rig.take()) <= chunk:
                threading.Event().wait(0.001)
        assert rig.take() == ["ok"] * 8
        assert switches(status) == before
    finally:
        rig.close()


def test_the_engine_goes_first_where_processors_are_short(make_rig: Make) -> None:
    rig = make_rig().open()
    of_process = os.getpriority(os.PRIO_PROCESS, pid_of(rig.runner))
    assert of_process == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def switches(status: Path) -> int:
    (line,) = (s for s in status.read_text().split("\n") if s.startswith("voluntary_ctxt"))
    return int(line.split()[1])


def settled(status: Path) -> None:
    idle, before = 0, -1
    while idle < 20:
        now = switches(status)
        idle, before = (idle + 1, now) if now == before else (0, now)
        threading.Event().wait(0.005)


_ENGINE = """
    import os, sys, threading, pathlib
    from support.runners import Rig
    rig = Rig("process", pathlib.Path(sys.argv[1]), on_lookup=sys.argv[2])
    rig.client.open()
    rig.submit(rig.lookups(1))
    if sys.argv[2] == "block":
        rig.wait_past("blocking")
    if sys.argv[3] == "forked" and os.fork() == 0:
        threading.Event().wait(60)
    print(rig.runner.pid, flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(("trouble", "copy"), [("", ""), ("", "forked"), ("block", "")])
def test_the_process_ends_with_the_engine(tmp_path: Path, trouble: str, copy: str) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_ENGINE), str(tmp_path), trouble, copy],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        process_group=0,
    )
    with engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        assert is_there(child)
        os.kill(engine.pid, signal.SIGKILL)
        for _ in range(3000):
            if not is_there(child):
                break
            threading.Event().wait(0.01)
        gone = not is_there(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    assert gone
    if not trouble:
        assert (tmp_path / "diary").read_text().split() == ["open", "opened", "closed"]
