"""A hook that switches light and dark pictures together with the site's colours.

The sources have ``<picture>`` elements, because GitHub then follows the reader's colour scheme.
"""

from __future__ import annotations

import re
from typing import Any

_PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)"></picture>'
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _PICTURE.sub(
        r'<img alt="\g<alt>" src="\g<light>#only-light">'
        r'<img alt="\g<alt>" src="\g<dark>#only-dark">',
        markdown,
    )
