from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


def compile_extension(source: Path, directory: Path, *flags: str) -> ModuleType | None:
    """Compile and load an extension; return ``None`` if a compiler or a header is missing."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    headers = Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        return None
    library = directory / f"{source.stem}.abi3.so"
    flags = ("-O2", "-shared", "-fPIC", *_WARNINGS, *flags, *os.environ.get("CFLAGS", "").split())
    subprocess.run([compiler, *flags, f"-I{headers}", source, "-o", library], check=True)
    spec = importlib.util.spec_from_file_location(source.stem, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
