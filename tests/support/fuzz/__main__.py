"""``python -m support.fuzz``: fuzz all targets in turn, and keep inputs that reach new code.

The command needs atheris, and runs one target at a time. If an input breaks a rule, the command
adds the input to the corpus. Each run of the tests tries the whole corpus again.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from support.fuzz.corpus import read_corpus, write_corpus

_MAX_BYTES = 4096
# The maximum length of a kept input, and the maximum number of kept inputs.
_KEPT_BYTES = 600
_KEPT = 60
_INPUT_S = 10
_MEMORY_MIB = 1024
#: Atheris gets a new process after this time, because its memory grows with some targets' inputs.
_SLICE_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--target", action="append", help="only this one; repeatable")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _fuzz(*options.inside)
    from support.fuzz.targets import TARGETS

    names = options.target or list(TARGETS)
    seconds = options.minutes * 60 / len(names)
    slices = [min(_SLICE_S, seconds - begun) for begun in range(0, math.ceil(seconds), _SLICE_S)]
    broken = [name for name in names if not all(_run(name, each) for each in slices)]
    print(f"broken: {', '.join(broken)}" if broken else "no rule was broken")
    return 1 if broken else 0


def _run(name: str, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as work:
        found, crashes = Path(work) / "found", Path(work) / "crashes"
        found.mkdir()
        crashes.mkdir()
        for number, data in enumerate(read_corpus(name)):
            (found / str(number)).write_bytes(data)
        limits = [f"-timeout={_INPUT_S}", f"-rss_limit_mb={_MEMORY_MIB}", f"-max_len={_MAX_BYTES}"]
        limits += ["-print_final_stats=1", f"-artifact_prefix={crashes}/"]
        command = [sys.executable, "-m", "support.fuzz", "--inside", name]
        ran = subprocess.run(
            [*command, f"-max_total_time={round(seconds)}", *limits, str(found)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        executed = re.search(r"number_of_executed_units: *(\d+)", ran.stdout)
        count = int(executed[1]) if executed else 0
        reaching = len(list(found.iterdir()))
        print(f"{name}: {count:,} inputs, {reaching} of them kept for what they reach", flush=True)
        inputs = [path.read_bytes() for path in found.iterdir()]
        kept = sorted((data for data in inputs if len(data) <= _KEPT_BYTES), key=len)[:_KEPT]
        broken = [path.read_bytes() for path in crashes.iterdir()]
        write_corpus(name, [*kept, *broken])
        if ran.returncode or broken:
            said = re.sub(r"^(INFO|WARNING):.*\n", "", ran.stdout, flags=re.MULTILINE)
            print(said[-4000:], flush=True)
        return ran.returncode == 0 and not broken


def _fuzz(name: str, *arguments: str) -> int:
    import atheris  # type: ignore[import-untyped]

    with atheris.instrument_imports(include=["kvtier_sdk", "kvtier_file", "kvtier_redis"]):
        import kvtier_sdk  # noqa: F401
    with atheris.instrument_imports(include=["kvtier_s3", "support.fuzz"]):
        from support.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
