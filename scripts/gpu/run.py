"""Check the worker on this machine's accelerator, and print one report of figures.

    python3 run.py [--out FOLDER] [--only NAME,NAME] [--limit-s SECONDS]

It needs Python 3.12, torch and numpy, but no network; the rest lies beside this file. Another
Python does not use the packages in python3.12/ but its own. The report is printed as it grows, and
written to FOLDER/report.txt and FOLDER/report.json (default: $OUT, or the current folder). The exit
status is 1 if a check failed. A check that wants a missing device has not failed: the end of the
report names it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def find_packages() -> None:
    """Put the packages beside this file on the path of this process and of those it starts."""
    paths = [str(HERE), str(HERE / "kvtier")]
    if sys.version_info[:2] == (3, 12):
        paths.append(str(HERE / "python3.12"))
    sys.path[:0] = paths
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])


if __name__ == "__main__":
    find_packages()
    from gpu_checks.main import main

    sys.exit(main(__doc__))
