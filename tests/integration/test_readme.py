"""The README's library example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"^prints `(.*)`\.$", text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == printed
