"""The website: every document has its place, links lead to pages, nothing comes from elsewhere."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / ".mkdocs.yml").read_text())


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="needs the extra docs (make docs)")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from pages(below)


def test_every_document_is_in_the_navigation_once(hooks: ModuleType) -> None:
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(CONFIG["nav"])) == sorted(documents | set(hooks.SOURCES) | {hooks.VIEWS})


def test_every_document_is_in_the_index(hooks: ModuleType) -> None:
    text = (ROOT / "docs/index.md").read_text()
    documents = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md", "overview.md"}
    assert {name for name in documents if f"]({name})" not in text} == set()


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("cli.md", "[a](agent.md#api)", "[a](agent.md#api)"),
        ("access.md", "[a](../SECURITY.md#what-is-in-it)", "[a](security.md#what-is-in-it)"),
        ("contributing.md", "[a](docs/harm.md), [b](#tests)", "[a](harm.md), [b](#tests)"),
        ("api/index.md", "[a](../../protos/x.proto)", "[a](../files/protos/x.proto)"),
        ("examples.md", "[a](x.py) ![b](../docs/images/trace.svg)", "[a](files/examples/x.py) ![b](images/trace.svg)"),
        ("cli.md", "[a](https://example.com/b.md)", "[a](https://example.com/b.md)"),
        ("cli.md", "```\n[a](../LICENSE)\n```\n", "```\n[a](../LICENSE)\n```\n"),
        ("cli.md", "text:\n* one\n* two\n", "text:\n\n* one\n* two\n"),
    ],
)
def test_what_is_written_for_the_repository_is_right_on_the_site(
    hooks: ModuleType, page: str, text: str, expected: str
) -> None:
    assert hooks.for_site(text, page) == expected


@pytest.mark.parametrize("tag", ['<script src="https://cdn.example/x.js">', '<link rel="x" href="//fonts.example">'])
def test_a_page_that_loads_something_from_elsewhere_is_refused(hooks: ModuleType, tag: str) -> None:
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    page = type("Page", (), {"file": File("cli.md", "docs", "site", use_directory_urls=False)})
    with pytest.raises(PluginError, match=r"cli\.md loads something from elsewhere"):
        hooks.on_post_page(f"<html>{tag}</html>", page=page, config=None)
    link = '<a href="https://example.com">a link is no load</a>'
    assert hooks.on_post_page(link, page=page, config=None) == link
