"""The list of traces in a real browser: it keeps itself up to date, and half-written files break nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def server(folder: Path) -> Iterator[Browser]:
    folder.mkdir()
    with browsing([folder]) as found:
        yield found


def test_traces_appear_change_and_go_by_themselves(new_tab: Any, server: Browser, folder: Path) -> None:
    tab = new_tab()
    tab.go(server.web.address)
    tab.page.get_by_text("New ones appear here automatically").wait_for()
    text = synthetic.text(2_000)
    path = folder / "run1" / "host_1.100.pt.trace.json"
    path.parent.mkdir()
    path.write_text(text[: len(text) // 2])
    link = tab.page.get_by_role("link", name=f"{folder}/run1", exact=True)
    link.wait_for()
    link.click()
    tab.page.get_by_text("the file is truncated").first.wait_for()
    path.write_text(text)
    address = tab.page.url
    server.shown(address.removeprefix(server.own))
    tab.go(address)
    assert tab.page.get_by_text("the file is truncated").count() == 0
    tab.go(f"{server.own}/")
    path.unlink()
    tab.page.locator("tr", has_text="gone").wait_for()
    assert link.count() == 0
    assert (tab.problems, tab.elsewhere) == ([], [])


def test_the_list_fits_and_is_accessible(new_tab: Any, server: Browser, folder: Path, axe: str) -> None:
    for name in ("a" * 90, "b", "c"):
        (folder / f"{name}.json").write_text(synthetic.text(300))
    for scheme, width in (("light", 360), ("dark", 1280)):
        tab = new_tab(bypass_csp=True, color_scheme=scheme, viewport={"width": width, "height": 800})
        tab.go(server.web.address)
        tab.page.get_by_role("link", name="b.json").wait_for()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == []
