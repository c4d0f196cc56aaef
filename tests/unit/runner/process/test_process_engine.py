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


_BARE_ENGINE = """
    import pathlib, sys
    from support.runners import Operation, Rig
    _, directory, on_open = sys.argv
    rig = Rig("process", pathlib.Path(directory), on_open=on_open)
    note = f"{rig.pool.fd}"
    try:
        rig.client.open()
        note += " " + " ".join(rig.do(Operation.STORE, 0))
    except Exception as error:
        note += f" {error}"
    rig.close()
    pathlib.Path(directory, "note").write_text(note)
"""


def run_bare_engine(directory: Path, closed: str, on_open: str) -> subprocess.CompletedProcess[str]:
    engine = [sys.executable, "-c", textwrap.dedent(_BARE_ENGINE), str(directory), on_open]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *engine],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        timeout=60,
    )


@pytest.mark.parametrize(
    ("closed", "lowest", "on_open", "said"),
    [
        ("2>&-", 2, "", "ok"),
        ("<&- >&- 2>&-", 0, "", "ok"),
        ("<&- >&- 2>&-", 0, "refuse", "connection refused"),
    ],
)
def test_an_engine_without_standard_streams(
    tmp_path: Path, closed: str, lowest: int, on_open: str, said: str
) -> None:
    """A process runs even if the engine's pool or socket has a descriptor from 0 to 2."""
    done = run_bare_engine(tmp_path, closed, on_open)
    assert (done.returncode, done.stderr) == (0, "")
    note = (tmp_path / "note").read_text()
    assert note.startswith(f"{lowest} ")
    assert note.endswith(said)


def test_what_a_library_prints_goes_nowhere_where_there_are_no_streams(tmp_path: Path) -> None:
    """The output goes to /dev/null or into a pipe, never into the engine's socket."""
    run_bare_engine(tmp_path, ">&- 2>&-", "print_raw")
    assert (tmp_path / "note").read_text().endswith("ok")
    assert [line.split(":")[0] for line in (tmp_path / "diary").read_text().split()[1:3]] == [
        "/dev/null",
        "pipe",
    ]
