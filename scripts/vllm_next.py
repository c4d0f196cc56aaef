"""Check kvtier-vllm against vLLM's next release, without the release's compiled code.

    python3 scripts/vllm_next.py .venv-vllm

The release's Python files are unpacked in the environment's directory and come first on Python's
path. Their dependencies come from the environment. No engine can run without the compiled code, but
the tests can check classes, signatures, registration and the scheduler's side. The unpacked files
are kept for the next run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

NEXT, RELEASE = "vllm==0.33.0", "0.33"
#: The tests that run without an engine.
NAMES = (
    *("plugin", "interface", "identity", "parallelism", "cache_policy"),
    *("region", "secondary_tier", "transfer_config"),
)
TESTS = [f"engines/vllm/tests/engine/test_{name}.py" for name in NAMES]


def unpack(environment: Path) -> Path:
    """Return the folder with the release's Python files; create it if it is missing."""
    folder = environment / "next" / NEXT
    if folder.exists():
        return folder
    wheels = environment / "next"
    pip = [str(environment / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(wheels), NEXT], check=True)
    (wheel,) = wheels.glob("vllm-*.whl")
    unfinished = folder.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unfinished, [n for n in archive.namelist() if not n.endswith(".so")])
    unfinished.rename(folder)
    wheel.unlink()
    return folder


def main() -> None:
    (environment,) = (Path(argument).absolute() for argument in sys.argv[1:])
    path = unpack(environment)
    command = [str(environment / "bin/python"), "-m", "pytest", *TESTS]
    variables = {"PYTHONPATH": str(path), "KVTIER_TEST_VLLM_RELEASE": RELEASE}
    sys.exit(subprocess.call(command, env={**os.environ, **variables}))


if __name__ == "__main__":
    main()
