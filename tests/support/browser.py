"""Opens pages in Chromium, if Chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium")
#: Measures the drawings, and shows the result as the page's title.
_SCRIPT = """<script>
const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1;
const found = {drawings: 0, clipped: [], height: document.body.scrollHeight};
for (const svg of document.querySelectorAll("svg")) {
  found.drawings += svg.getBoundingClientRect().height > 100;
  for (const text of svg.querySelectorAll("text"))
    if (!inside(text.getBoundingClientRect(), svg.getBoundingClientRect()))
      found.clipped.push(text.textContent);
}
document.title = JSON.stringify(found);
</script>"""


def measured(page: str, directory: Path) -> dict[str, Any]:
    """Lay a page out in the browser; return its drawings, its clipped texts and its height."""
    assert BROWSER is not None
    copy = directory / "measured.html"
    # Remove the page's content security policy, because it forbids scripts.
    copy.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page) + _SCRIPT)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *words, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)
    found: dict[str, Any] = json.loads(title)
    return found
