"""A hook that checks the finished pages for faults that a strict build misses.

A page must not load anything from another host, or show the markup of a docstring.
"""

from __future__ import annotations

import html
import logging
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.checks")

_FOREIGN = re.compile(
    r"<(?:script|img|iframe|link|source)\b[^>]*(?:src|href)=\"?((?:https?:)?//[^\s\">]+)"
)
_CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_LEFT_OVER = re.compile(r"``|:(?:attr|class|data|func|meth|mod):|::$", re.MULTILINE)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for url in _FOREIGN.findall(output):
        log.warning("%s loads %s", page.file.src_uri, url)
    text = html.unescape(_TAG.sub("", _CODE.sub("", output)))
    for left in _LEFT_OVER.finditer(text):
        around = " ".join(text[max(0, left.start() - 40) : left.end() + 40].split())
        log.warning("%s has markup left in its text: %s", page.file.src_uri, around)
    return output
