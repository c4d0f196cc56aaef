"""The tutorial for authors runs as it stands, and every block prints what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.author import ROOT, stranger
from support.tutorial import blocks_of, missing_lines, outputs_of, script_of

pytestmark = pytest.mark.reader

PAGE = ROOT / "docs" / "backend-authors" / "README.md"


def test_every_block_does_what_the_page_says(wheels: Path, tmp_path: Path) -> None:
    blocks = blocks_of(PAGE.read_text())
    environment = stranger(wheels)
    environment |= {
        # The packages that are on no index yet.
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


def test_what_is_not_printed_is_seen() -> None:
    printed = "one  1\nnoise\ntwo 2.5 ms\n"
    assert missing_lines("one 1\ntwo ... ms\n", printed) == []
    assert missing_lines("two ... ms\none 1\n", printed) == ["one 1"]
    assert missing_lines("three\n", printed) == ["three"]
    assert missing_lines("on\n", printed) == ["on"]
