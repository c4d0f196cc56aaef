from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.author import ROOT, stranger

pytestmark = pytest.mark.reader

PAGE = ROOT / "docs" / "backend-authors" / "README.md"
_BLOCK = re.compile(
    r"(?:^<!-- file: (\S+) -->\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARK = "--- block {} ---"


@dataclass(frozen=True)
class Block:
    """A fenced block. ``kind`` is the word after the fence; ``file`` is the path to write to."""

    kind: str
    text: str
    file: str | None


def blocks_of(page: str) -> list[Block]:
    return [Block(kind, text, file or None) for file, kind, text in _BLOCK.findall(page)]


def script_of(blocks: list[Block]) -> str:
    lines = ["set -eu", "exec 2>&1"]
    for index, block in enumerate(blocks):
        lines += [f"echo {shlex.quote(_MARK.format(index))}", _step(block)]
    return "\n".join(lines) + "\n"


def outputs_of(printed: str, blocks: list[Block]) -> list[str]:
    parts = re.split(rf"^{_MARK.format('[0-9]+')}\n", printed, flags=re.MULTILINE)
    return parts[1 : len(blocks) + 1]


def missing_lines(expected: str, printed: str) -> list[str]:
    """Return the expected lines that are missing or out of order; ``...`` matches anything."""
    lines = iter(_plain(line) for line in printed.splitlines())
    missing = []
    for line in expected.splitlines():
        pattern = re.compile(".*".join(map(re.escape, _plain(line).split("..."))))
        if not any(pattern.fullmatch(found) for found in lines):
            missing.append(line)
    return missing


def _plain(line: str) -> str:
    return " ".join(line.split())


def _step(block: Block) -> str:
    if block.file is not None:
        return f"cat > {shlex.quote(block.file)} <<'END OF FILE'\n{block.text}END OF FILE"
    if block.kind == "diff":
        return f"git apply -p0 --recount --unidiff-zero - <<'END OF DIFF'\n{block.text}END OF DIFF"
    if block.kind == "sh":
        return block.text
    assert block.kind == "text", f"a block of {block.kind} without a file"
    return ":"


def test_every_block_does_what_the_page_says(wheels: Path, tmp_path: Path) -> None:
    blocks = blocks_of(PAGE.read_text())
    environment = stranger(wheels)
    environment |= {
        # The packages are not on PyPI yet, so pip gets the built wheels.
        "PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {wheels}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", script_of(blocks)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    outputs = outputs_of(done.stdout, blocks)
    assert len(outputs) == len(blocks)
    for index, block in enumerate(blocks):
        if block.kind == "text":
            printed = outputs[index - 1]
            assert missing_lines(block.text, printed) == [], printed


def test_a_page_has_no_block_that_is_not_run() -> None:
    text = PAGE.read_text()
    assert len(blocks_of(text)) * 2 == sum(line.startswith("```") for line in text.splitlines())
