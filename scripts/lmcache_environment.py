"""Make a virtual environment in which LMCache's server runs on a CPU.

    python3 scripts/lmcache_environment.py .venv-lmcache

LMCache's wheel requires CUDA's libraries, but imports them only on a machine with a GPU. So this
script installs only packages that LMCache's server and its file and Redis adapters import.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine_environment import TORCH, Pip, make, requirements

LMCACHE = "lmcache==0.5.6"
NEEDED = frozenset(
    {
        "aiofiles",
        "aiohttp",
        "blake3",
        "cachetools",
        "cryptography",
        "fastapi",
        "httptools",
        "httpx",
        "msgspec",
        "numba",
        "numpy",
        "nvtx",
        "opentelemetry-api",
        "opentelemetry-exporter-otlp",
        "opentelemetry-exporter-prometheus",
        "opentelemetry-sdk",
        "prometheus-client",
        "psutil",
        "py-cpuinfo",
        "pyyaml",
        "pyzmq",
        "sortedcontainers",
        "uvicorn",
    }
)


def install_lmcache(pip: Pip) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, LMCACHE)
        (wheel,) = Path(folder).glob("*.whl")
        needed = [line for name, line in requirements(wheel) if name in NEEDED]
        pip("install", TORCH, "requests", *needed)
        pip("install", "--no-deps", str(wheel))


if __name__ == "__main__":
    make("lmcache", install_lmcache, __file__)
