"""The page of a memory snapshot in a real browser: drawn, without errors, accessible, on every screen."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.targets.memory_snapshots import BASE, snapshot, write_snapshot
from support.web.browsing import Browser, browsing
from support.web.tabs import opened

pytestmark = pytest.mark.slow

ATTACK = "\"'><img src=x onerror=window.attacked=1>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("snapshots")
    value = snapshot()
    value["segments"][0]["blocks"][1]["frames"] = [{"filename": f"/x/{ATTACK}.py", "line": 1, "name": ATTACK}]
    with browsing([write_snapshot(folder / "x.memory_snapshot.pickle", value)]) as found:
        yield found


@pytest.fixture(scope="module")
def path(server: Browser) -> str:
    """Of the page."""
    (found,) = re.findall(r'href="/c/(\w+)"', server.ask("/").text)
    return f"/c/{found}/snapshot"


def pages(path: str) -> list[str]:
    return [path, f"{path}?block=0-{BASE:#x}", f"{path}?segment=0-{BASE:#x}"]


def test_a_file_leads_to_its_map_where_a_click_on_a_block_shows_its_stack(
    new_tab: Any, server: Browser, path: str
) -> None:
    tab = opened(new_tab, server, path)
    tab.go(f"{server.own}/")
    tab.page.get_by_role("link", name="x.memory_snapshot.pickle").click()
    tab.page.get_by_role("heading", name="Memory snapshot").wait_for()
    tab.page.locator("svg.segment rect.block-active").first.click()
    tab.page.locator("ol.stack li", has_text="step (/home/ada/train.py:12)").wait_for()
    assert tab.page.locator("svg.segment rect.chosen").count() == 1
    assert tab.page.evaluate("typeof window.attacked") == "undefined"
    assert tab.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert (tab.problems, tab.elsewhere) == ([], [])


def test_a_stack_is_reached_by_the_keyboard_alone_and_without_scripts(new_tab: Any, server: Browser, path: str) -> None:
    tab = new_tab(java_script_enabled=False)
    name, _, value = server.cookie.partition("=")
    tab.page.context.add_cookies([{"name": name, "value": value, "url": server.own}])
    tab.go(server.own + path)
    tab.page.locator(f"a[href*='segment=0-{BASE:#x}']").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**segment=0-**")
    tab.page.locator("table a[href*='block=0-']").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**block=0-**")
    assert "step (/home/ada/train.py:12)" in tab.page.locator("ol.stack").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_every_screen(new_tab: Any, server: Browser, path: str, width: int, scheme: str) -> None:
    tab = opened(new_tab, server, path, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for address in pages(path):
        server.shown(address)
        tab.go(server.own + address)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, address


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible(new_tab: Any, server: Browser, path: str, axe: str, scheme: str) -> None:
    tab = opened(new_tab, server, path, bypass_csp=True, color_scheme=scheme)
    for address in pages(path):
        server.shown(address)
        tab.go(server.own + address)
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:160]) for each in found] == [], address
