"""Build the image of deploy/ without a registry, and start it as the pod's user.

Usage: python tests/image.py

The script needs root, and the wheels that "make dist" builds. The base image is a Debian
with pip, made by debootstrap, in place of vLLM's image. The build has no network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTAINERFILE = ROOT / "deploy/Containerfile"
_DEBIAN = ("debootstrap", "--variant=minbase", "--include=python3-pip", "bookworm")
_START = "kvtier --version | grep compiled && kvtier check 'file:///tmp/kv?min_free=0'"


def main() -> None:
    if not list((ROOT / "dist").glob("kvtier_sdk-*-cp*.whl")):
        sys.exit("dist/ has no compiled wheel: remove dist/SHA256SUMS, and run this again")
    with tempfile.TemporaryDirectory(prefix="kvtier-image-") as folder:
        base, context = Path(folder, "base"), Path(folder, "dist")

        def buildah(*words: str | Path) -> str:
            places = [f"--root={folder}/store", f"--runroot={folder}/run"]
            command = ["buildah", "--storage-driver=vfs", *places, *map(str, words)]
            environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
            return subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environment
            ).stdout.split("\n")[0]

        subprocess.run([*_DEBIAN, str(base)], check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(ROOT / "dist", context, ignore=shutil.ignore_patterns("gpu-bundle"))
        wanted = re.findall(r"'(kvtier-sdk\[.*?\])'(.*) \\", CONTAINERFILE.read_text())[0]
        python = next(base.glob("usr/bin/python3.[0-9]*"))
        pip = [sys.executable, "-m", "pip", "--python", str(python), "download", "--quiet"]
        places = ["--only-binary=:all:", "--find-links", str(context), "--dest", str(context)]
        subprocess.run([*pip, *places, wanted[0], *wanted[1].split()], check=True)
        empty = buildah("from", "scratch")
        buildah("add", "--quiet", empty, base, "/")
        buildah("commit", "--quiet", empty, "localhost/debian")
        options = ["--build-arg=BASE=localhost/debian", "--build-arg=PIP_OPTIONS=--no-index"]
        buildah("bud", "--network=none", *options, f"--file={CONTAINERFILE}", "--tag=it", context)
        print(buildah("run", "--user=1000:1000", buildah("from", "it"), "--", "sh", "-c", _START))


if __name__ == "__main__":
    main()
