"""Check kvtier_sdk.worker on this machine's accelerator, and write one report of figures.

    python3 run.py [--out FOLDER] [--only NAME,NAME] [--limit-s SECONDS]

This program needs Python 3.12, torch and numpy, but no network. This file's folder contains all
other packages, the tests and the benchmark. Another version of Python ignores the packages in
python3.12/, and must have its own. The report is printed as it grows, and written to
FOLDER/report.txt and FOLDER/report.json (default: $OUT, or the current folder). The exit status is
1 if a check failed. Without a device, tests that need one are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE / "tests/gpu"
#: These options make pytest ignore the configuration of a checkout around this folder.
PYTEST = [
    *("-m", "pytest", "-q", "-s", "-rs", "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-c", os.devnull, "--rootdir", str(HERE), "--confcutdir", str(TESTS)),
    *("-o", "markers=gpu", "-o", "junit_family=xunit1"),
]
#: The seconds after which a check is killed, because a driver can hang.
LIMITS_S = {
    "machine": 60,
    "batch": 45,
    "worker": 90,
    "streams": 45,
    "seam": 30,
    "submission": 75,
    "expedited": 30,
    "capture": 30,
    "dropped": 60,
    "round_trip": 60,
    "bandwidth": 180,
}


def environment() -> dict[str, str]:
    """Return an environment in which checks import these packages and pytest loads no plugins."""
    paths = [str(HERE / "kvtier"), str(HERE / "tests")]
    if sys.version_info[:2] == (3, 12):
        paths.append(str(HERE / "python3.12"))
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def run(name: str, limit_s: float, out: Path) -> dict[str, Any]:
    """Run a check in its own process group, because a check may crash, hang or lose the device."""
    results = out / f"{name}.xml"
    command = [sys.executable, *PYTEST, f"--junitxml={results}", str(TESTS / f"test_{name}.py")]
    if name == "bandwidth":
        command = [sys.executable, str(HERE / "benchmarks/worker.py"), "--rounds", "5"]
    log = out / f"{name}.txt"
    began_s = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            fault = "" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            fault = f"was ended after {limit_s:.0f} s"
    text = log.read_text(errors="replace")
    log.unlink()
    check = {"name": name, "fault": fault, "took_s": round(time.monotonic() - began_s, 3)}
    return check | {"figures": figures(results), "output": text}


def figures(results: Path) -> dict[str, str]:
    """Read the figures from the results file of a check, and remove the file."""
    found = {}
    if results.exists():
        for figure in ElementTree.parse(results).iter("property"):
            found[figure.attrib["name"]] = figure.attrib["value"]
        results.unlink()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path(os.environ.get("OUT") or ".")
    parser.add_argument("--out", type=Path, default=out, help=f"default: {out}")
    names = ", ".join(LIMITS_S)
    parser.add_argument("--only", default=",".join(LIMITS_S), help=f"some of: {names}")
    parser.add_argument("--limit-s", type=float, default=480, help="of the whole run; default: 480")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(LIMITS_S):
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {names}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + arguments.limit_s
    checks: list[dict[str, Any]] = []
    with (arguments.out / "report.txt").open("w") as report:

        def say(text: str) -> None:
            print(text, flush=True)
            print(text, file=report, flush=True)

        say(f"kvtier on an accelerator, {time.strftime('%Y-%m-%d %H:%M:%S %z')}")
        for name in wanted:
            left_s = max(0.0, end_s - time.monotonic())
            say(f"\n{name}")
            checks.append(run(name, min(LIMITS_S[name], left_s), arguments.out))
            say(checks[-1]["output"].rstrip())
            say(f"{name}: {checks[-1]['fault'] or 'passed'}; took {checks[-1]['took_s']:.1f} s")
            # Write after each check, because a later check may end the run.
            (arguments.out / "report.json").write_text(json.dumps({"checks": checks}, indent=1))
        failed = [check["name"] for check in checks if check["fault"]]
        say(f"\n{len(checks) - len(failed)} passed")
        say(f"{len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    print(f"the report is in {arguments.out}/report.txt and report.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
