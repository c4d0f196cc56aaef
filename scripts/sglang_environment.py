"""Make a virtual environment in which SGLang's hierarchical cache runs on a CPU.

    python3 scripts/sglang_environment.py .venv-sglang

SGLang's wheel requires CUDA's libraries, but imports them only on a machine with a GPU. So this
script installs only packages that SGLang's host pools, cache controller and storages import.
torchvision's wheel is built for another torch, so only its Python code runs here.
``tests/support/sglang_platform.py`` declares torchvision's operators.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine_environment import TORCH, Pip, make, requirements

SGLANG = "sglang==0.5.23"
NEEDED = frozenset(
    {
        "aiohttp",
        "apache-tvm-ffi",
        "compressed-tensors",
        "fastapi",
        "gguf",
        "ipython",
        "mistral-common",
        "msgspec",
        "numpy",
        "orjson",
        "packaging",
        "pillow",
        "prometheus-client",
        "psutil",
        "pybase64",
        "pydantic",
        "python-multipart",
        "pyzmq",
        "regex",
        "requests",
        "sentencepiece",
        "setproctitle",
        "tiktoken",
        "tokenizers",
        "tqdm",
        "transformers",
        "uvicorn",
        "uvloop",
        "xxhash",
    }
)
# Packages that SGLang imports without declaring them as requirements.
UNNAMED = ("dill", "loguru", "sortedcontainers", "traitlets", "triton")
WITHOUT_DEPENDENCIES = ("torchvision==0.28.0",)


def install_sglang(pip: Pip) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, SGLANG)
        (wheel,) = Path(folder).glob("*.whl")
        needed = [line for name, line in requirements(wheel) if name in NEEDED]
        pip("install", TORCH, *needed, *UNNAMED)
        pip("install", "--no-deps", str(wheel), *WITHOUT_DEPENDENCIES)


if __name__ == "__main__":
    make("sglang", install_sglang, __file__)
