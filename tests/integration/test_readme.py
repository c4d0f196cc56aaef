from __future__ import annotations

import re
import sys
from pathlib import Path

from support.author import run

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"^prints `(.*)`\.$", text, re.MULTILINE)
    assert run([sys.executable, "-c", example], README.parent).strip() == printed


def test_whoever_is_told_to_install_is_told_from_where() -> None:
    """The packages are not on PyPI, so install instructions link to README.md#install."""
    text = README.read_text()
    (command,) = re.findall(r"^    pip install '\.\[.*$", text, re.MULTILINE)
    assert "\n## Install\n" in text
    for package in re.findall(r"\./\S+", command):
        assert (README.parent / package / "pyproject.toml").exists()
    asks = re.compile(r"pip install [^\n]*kvtier-\w+")
    pages = [
        page
        for place in ("docs", "backends", "engines", "examples")
        for page in (README.parent / place).rglob("*.md")
        if asks.search(page.read_text())
    ]
    assert len(pages) >= 10
    for page in pages:
        (link,) = set(re.findall(r"\((\S+README\.md)#install\)", page.read_text())) or {None}
        assert link is not None, page
        assert (page.parent / link).resolve() == README, page
