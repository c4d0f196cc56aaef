"""Install the wheels of dist/ in a root file system with only Python, and test them there.

Usage: python tests/install.py PYTHON...

For each PYTHON, pip downloads the wheels' requirements, and the script makes a root with this
Python and the system's libraries, but without a shell, compiler, network or home directory. There
the script installs the wheels into a new environment, runs the demo, and tests the tiers "memory"
and "file" with the conformance kit. "make dist" builds the wheels. If the user is not
root, the kernel must allow user namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wheels import ROOT, settings

DIST = ROOT / "dist"
_WANTED = ("kvtier-sdk[cli,seal,testing]", "kvtier-file")
_COPIED = (
    "tests/support/__init__.py",
    "tests/support/keys.py",
    "tests/unit/tiers/test_memory_conformance.py",
    "backends/file/tests/test_file_conformance.py",
)

#: A shell script with four arguments: new root, work directory, Python's prefix, command.
_ENTER = """
root=$1 work=$2 prefix=$3
shift 3
mount -t tmpfs none "$root"
for place in /lib /lib64 "$prefix"; do
    mkdir -p "$root$place"
    mount --rbind "$place" "$root$place"
    mount -o remount,bind,ro "$root$place"
done
mkdir "$root/trial" "$root/dev" "$root/proc" "$root/tmp"
mount --bind "$work" "$root/trial"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
cd "$root/trial"
exec env -i HOME=/trial/home PATH=/trial/env/bin LANG=C.UTF-8 "$(command -v chroot)" "$root" "$@"
"""

_INSIDE = f"""
import os, shutil, socket, subprocess, sys, venv

os.chdir("/trial")
assert [name for _, name in socket.if_nameindex()] == ["lo"], "there is a network"
assert not any(map(os.path.exists, ("/bin", "/usr", "/etc"))), "the root holds more than Python"
venv.create("env", with_pip=True)
assert sorted(path for path in map(shutil.which, ("pip", "sh", "cc")) if path) == [
    "/trial/env/bin/pip"
]
for command in (
    ["pip", "install", "--quiet", "--no-index", "--find-links", "wheelhouse", *{_WANTED}],
    ["kvtier", "--version"],
    ["python", "demo.py"],
    ["python", "-m", "pytest", "-p", "no:cacheprovider", "tests", "backends"],
):
    subprocess.run([f"env/bin/{{command[0]}}", *command[1:]], check=True)
"""


def main() -> int:
    check_release()
    faults = [python for python in sys.argv[1:] if not tried(python)]
    if faults:
        print("failed:", *faults, file=sys.stderr)
    return 1 if faults or len(sys.argv) < 2 else 0


def check_release() -> None:
    checks = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(checks, cwd=DIST, check=True)
    sums = (DIST / "SHA256SUMS").read_text()
    (sbom,) = DIST.glob("*.cdx.json")
    listed = json.loads(sbom.read_text())
    components = [listed["metadata"]["component"], *listed["components"]]
    names = {one["name"].replace("-", "_") for one in components}
    for file in (*DIST.glob("*.whl"), *DIST.glob("*.tar.gz"), sbom):
        assert f"  {file.name}\n" in sums, f"{file.name} has no checksum"
        assert file == sbom or file.name.partition("-")[0] in names, (
            f"{sbom.name} lacks {file.name}"
        )


def tried(python: str) -> bool:
    asked = [python, "-c", "import sys; print(sys.base_prefix, sys.version.split()[0])"]
    prefix, version = subprocess.check_output(asked, text=True).split()
    print(f"--- Python {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-install-") as folder:
        work, root = Path(folder, "work"), Path(folder, "root")
        root.mkdir()
        fill(work, python)
        enter = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        if os.geteuid():
            enter.append("--map-root-user")
        enter += ["sh", "-euc", _ENTER, "sh", str(root), str(work), prefix]
        inside = [f"{prefix}/bin/python3", "-c", _INSIDE]
        return subprocess.run([*enter, *inside], check=False).returncode == 0


def fill(work: Path, python: str) -> None:
    for name in _COPIED:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, work / name)
    shutil.copy(ROOT / "examples/demo.py", work)
    (work / "pytest.ini").write_text(settings())
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    download = ["download", "--quiet", "--only-binary=:all:", "--find-links", str(DIST)]
    download += ["--dest", str(work / "wheelhouse"), *_WANTED]
    subprocess.run([*pip, *download], check=True)


if __name__ == "__main__":
    sys.exit(main())
