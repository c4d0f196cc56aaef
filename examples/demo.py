"""Replay chats through a host pool and a file tier, and repeat them in a second process.

The second process begins with an empty host pool. It finds the first process's chunks in the files.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: A chunk is 16 tokens of a model with 32 KiB of keys and values per token, such as Llama 3.2 1B in
#: bfloat16. The pool is too small for all chunks, so that both processes load chunks from files.
CHATS = ["--requests", "200", "--slots", "256", "--chunk-bytes", "512KiB"]
CHAT_TOKENS = 16

#: Mooncake's traces have blocks of 512 tokens. The chunks are small, because the traces are long.
TRACE = ["--chunk-bytes", "4KiB", "--trace"]
TRACE_TOKENS = 512


def main() -> int:
    """Run ``kvtier replay`` twice over one directory; return the first nonzero exit status."""
    kvtier = os.path.relpath(Path(sys.executable).with_name("kvtier"))
    trace = sys.argv[1:]
    workload, chunk_tokens = ([*TRACE, *trace], TRACE_TOKENS) if trace else (CHATS, CHAT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        file = Path(folder, "report.json")
        tiers = ["--tier", f"file://{folder}/kv", "--report", str(file)]
        command = [kvtier, "replay", *workload, *tiers]
        for title in ("first process, empty directory", "second process, same directory"):
            print(f"\n--- {title}\n$ {shlex.join(command)}", flush=True)
            status = subprocess.run(command, check=False).returncode
            if status:
                return status
        print(f"\n{summary(json.loads(file.read_text()), chunk_tokens)}")
    return 0


def summary(second: dict[str, Any], chunk_tokens: int) -> str:
    """Return a sentence about the chunks that the second process found and compared."""
    found, wanted = second["hit_blocks"], second["blocks"]
    share = f"all {wanted:,}" if found == wanted else f"{found:,} of {wanted:,}"
    _, files = second["tiers"]
    return (
        f"Shown: the second process found {share} chunks of its prompts, {found * chunk_tokens:,} "
        f"tokens' worth: {files['hit_blocks']:,} in the files that the first had left, the others "
        f"in host memory by then; {second['compared_bytes']:,} bytes were compared, all equal."
    )


if __name__ == "__main__":
    sys.exit(main())
