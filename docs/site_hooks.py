"""Hooks of MkDocs (.mkdocs.yml): generated pages, pages and files from outside of docs/, links to them, and nothing
from elsewhere.

The documents are written to be read in the repository, where a link leads to the file that it names. On the site, a
link to one of PAGES leads to that page, and any other file of the repository that a page links to is copied beside the
pages.
"""

import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # file of the repository -> page of the site
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "examples/accelerator/README.md": "example-accelerator.md",
}
VIEWS = "views.md"  # what docs/generate_views.py prints
SOURCES = {page: source for source, page in PAGES.items()}
COPIES = "files"  # folder of the site for other files of the repository
_LINK = re.compile(r"(?<=\]\()(?![a-z+]+:|#|/)([^)#\s]+)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LIST_IN_PARAGRAPH = re.compile(r"^((?![*\-|#> ]|\d+\. )\S.*\n)(?=[*-] )", re.MULTILINE)
_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
)


def source_of(page: str) -> str:
    """The file of the repository that a page is made of."""
    return SOURCES.get(page, f"docs/{page}")


def place_on_site(target: str) -> str:
    """Where a file of the repository is on the site."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"{COPIES}/{target}"


def targets(markdown: str, page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    folder = posixpath.dirname(source_of(page))
    for match in _LINK.finditer(_FENCE.sub("", markdown)):
        yield posixpath.normpath(posixpath.join(folder, match[1]))


def for_site(markdown: str, page: str) -> str:
    """The same text with links that are right on the site. What is in a block of code is left as it is.

    A list may follow a line of text at once in the repository; the site's Markdown wants an empty line between them.
    """
    folder = posixpath.dirname(source_of(page))

    def on_site(match: re.Match[str]) -> str:
        place = place_on_site(posixpath.normpath(posixpath.join(folder, match[1])))
        return posixpath.relpath(place, posixpath.dirname(page) or ".")

    def changed(text: str) -> str:
        return _LIST_IN_PARAGRAPH.sub(r"\1\n", _LINK.sub(on_site, text))

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [changed(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, changed(markdown[end:])])


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the page of views, the pages from outside of docs/, and the files that pages link to.

    A dead link is left to MkDocs.
    """
    views = runpy.run_path(str(ROOT / "docs/generate_views.py"))["document"]()
    files.append(File.generated(config, VIEWS, content=views))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    linked = {target for file in files.documentation_pages() for target in targets(file.content_string, file.src_uri)}
    for target in sorted(linked):
        if not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file():
            files.append(File.generated(config, place_on_site(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links for the repository into links for the site."""
    return for_site(markdown, page.file.src_uri)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuses pages that would load something from elsewhere."""
    if found := _ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output
