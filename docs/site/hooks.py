"""Hooks of mkdocs: they add pages from outside docs/, and change links to files that are no page of the site.

- `PAGES` are files of the repository that the site has as pages, README.md as its first one.
- A link to another file of the repository leads to `REPOSITORY_URL`. Without that variable only its text stays.
- A link to a file that does not exist ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "report-a-vulnerability.md",
    "cli/README.md": "plugin.md",
    "examples/budgets/README.md": "budgets.md",
}
"""For each file outside docs/ that the site shows: the path of its page."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<path>[^()#\s:]*)(?P<anchor>#[^()\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$|^(?: {4}|\t)[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page, with its links changed to links of the site."""
    source = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(match: re.Match[str]) -> str:
        if not match["path"]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        if not (ROOT / target).exists():
            raise PluginError(f"{source} links to {match['path']}, which is not in the repository")
        anchor = match["anchor"] or ""
        on_site = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        if on_site and (ROOT / target).is_file():
            here = posixpath.dirname(page.file.src_uri)
            return f"{match['image']}[{match['text']}]({posixpath.relpath(on_site, here or '.')}{anchor})"
        repository = config.repo_url
        return (
            f"[{match['text']}]({repository.rstrip('/')}/blob/main/{target}{anchor})" if repository else match["text"]
        )

    # Links in code stay unchanged: code is in the odd parts of the split.
    parts = _CODE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(linked, part) for index, part in enumerate(parts))
