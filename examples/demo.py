"""Play a workload through a host pool and a file tier, then once more in a second process.

The second process begins with an empty host pool: what it hits, the first one left on disk.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run ``kvtier replay`` twice over one directory; the status of the first that fails."""
    kvtier = str(Path(sys.executable).with_name("kvtier"))
    source = ["--trace", sys.argv[1]] if len(sys.argv) > 1 else ["--requests", "400"]
    # A trace is long; small chunks keep the demonstration under a minute on a slow disk.
    size = "4KiB" if len(sys.argv) > 1 else "64KiB"
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as root:
        command = [kvtier, "replay", *source, "--chunk-bytes", size, "--tier", f"file://{root}"]
        for title in ("first process, empty directory", "second process, same directory"):
            print(f"--- {title}\n$ {' '.join(command)}", flush=True)
            status = subprocess.run(command, check=False).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
