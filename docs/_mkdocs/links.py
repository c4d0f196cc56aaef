"""mkdocs hooks for pages from outside of ``docs/`` and for links into the repository.

Pages link by relative paths in the repository, as on GitHub. A link to a file that has a page in
the site leads to the page. A link to any other file or directory becomes text with the path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: Files outside of ``docs/`` that become pages, and the paths of the pages in the site.
OUTSIDE = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    **{
        f"backends/{readme.parent.name}/README.md": f"backends/{readme.parent.name}.md"
        for readme in sorted(ROOT.glob("backends/*/README.md"))
    },
}
_INSIDE = {page: path for path, page in OUTSIDE.items()}
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    own = page.file.src_uri
    folder = posixpath.dirname(_INSIDE.get(own, f"docs/{own}"))

    def followed(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = page_at(path, files)
        if uri is not None:
            return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(own) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # unchanged: mkdocs reports the broken link
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(followed, markdown)


def page_at(path: str, files: Files) -> str | None:
    """Return the site's page for a file or directory of the repository."""
    for candidate in (path, f"{path}/README.md"):
        uri = OUTSIDE.get(candidate)
        if uri is None and candidate.startswith("docs/"):
            uri = candidate.removeprefix("docs/")
        if uri is not None and files.get_file_from_path(uri):
            return uri
    return None
