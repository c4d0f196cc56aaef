"""The program: it reads its options and runs one check after the other."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from gpu_checks import CHECKS, Check
from gpu_checks.findings import Failure
from gpu_checks.process import run_check
from gpu_checks.report import Report


def main(description: str | None) -> int:
    """Run the checks, and return the exit status."""
    arguments = _arguments(description)
    report = Report(arguments.out)
    report.say(f"kvtier on an accelerator, {time.strftime('%Y-%m-%d %H:%M:%S %z')}")
    _import_torch(report)
    deadline_s = time.monotonic() + arguments.limit_s
    for check in arguments.only:
        report.begin(check)
        began_s = time.monotonic()
        left_s = deadline_s - began_s
        if left_s > 0:
            run_check(check, min(check.limit_s, left_s), report.take)
        else:
            report.take(Failure(f"no time was left of {arguments.limit_s:.0f} s"))
        report.end(time.monotonic() - began_s)
    passed = report.conclude()
    print(f"the report is in {arguments.out}/report.txt and report.json")
    return 0 if passed else 1


def _import_torch(report: Report) -> None:
    """Import torch before the first check is forked: all of them need it."""
    try:
        import kvtier_sdk.worker  # noqa: F401
    except Exception as error:
        report.say(f"the worker cannot be imported: {error}")


def _arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path(os.environ.get("OUT") or ".")
    parser.add_argument("--out", type=Path, default=out, help=f"default: {out}")
    names = ", ".join(check.name for check in CHECKS)
    parser.add_argument("--only", type=_named, default=CHECKS, help=f"some of: {names}")
    parser.add_argument("--limit-s", type=float, default=480, help="of the whole run; default: 480")
    return parser.parse_args()


def _named(text: str) -> list[Check]:
    wanted = text.split(",")
    unknown = set(wanted) - {check.name for check in CHECKS}
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no check {', '.join(sorted(unknown))}")
    return [check for check in CHECKS if check.name in wanted]
