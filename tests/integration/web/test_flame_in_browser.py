"""Flame graphs in a real browser: pointing, searching, arrow keys and zooming, small screens, and without scripts."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing
from support.web.contrast import ENOUGH_CONTRAST, contrasts
from support.web.hostile_trace import write_hostile
from support.web.tabs import opened

pytestmark = pytest.mark.slow
PAGES = ("?of=kernels", "?order=time", "?of=python&order=sandwich", "?of=kernels&base={base}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("flames")
    plain, other = folder / "plain.json", folder / "other.json"
    plain.write_text(synthetic.text(4_000))
    slower = json.loads(synthetic.text(4_000))
    for event in slower["traceEvents"]:
        event["dur"] = event.get("dur", 0) * (2 if event.get("cat") == "kernel" else 1)
    other.write_text(json.dumps(slower))
    with browsing([plain, other, write_hostile(folder / "hostile.json")]) as found:
        yield found


@pytest.fixture(scope="module")
def ids(server: Browser) -> list[str]:
    """Of the plain trace, the slower one and the hostile one."""
    return re.findall(r'href="/c/(\w+)"', server.ask("/").text)


def addresses(ids: list[str], of: int = 0) -> list[str]:
    return [f"/c/{ids[of]}/flame" + query.format(base=ids[1]) for query in PAGES]


def test_frames_tell_what_they_are_and_are_found_by_name(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/flame?of=kernels")
    tab.page.locator(".flame .frame", has_text="nccl:all_reduce").first.hover()
    assert re.search(r"nccl:all_reduce: .* %", tab.page.locator("#flame-about").inner_text())
    tab.page.get_by_label("Find frames").fill("NCCL")
    found = tab.page.locator(".flame .found")
    assert found.count() > 0
    assert f"{found.count()} of " in tab.page.locator("#flame-found").inner_text()
    assert all("nccl" in text.lower() for text in found.locator("title").all_text_contents())
    assert (tab.problems, tab.elsewhere) == ([], [])


def test_a_click_shows_a_frame_alone_and_the_way_back(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/flame?of=kernels")
    everything = tab.page.locator(".flame .frame").count()
    tab.page.locator(".flame .frame", has_text="nccl:all_reduce").first.click()
    tab.page.wait_for_url("**root=*")
    tab.page.get_by_role("link", name="Whole graph").click()
    tab.page.wait_for_url("**order=merged")
    tab.page.locator(".flame .frame").nth(everything - 1).wait_for()
    assert tab.problems == []


def test_arrow_keys_walk_through_the_frames(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/flame?of=kernels")
    focused = "document.activeElement.querySelector('title').textContent.split('\\n')[0]"
    assert tab.page.locator('.flame a[tabindex="0"]').count() == 1
    tab.page.locator('.flame a[tabindex="0"]').focus()
    walked = [tab.page.evaluate(focused)]
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp"):
        tab.page.keyboard.press(key)
        walked.append(tab.page.evaluate(focused))
    assert walked[0] == walked[4] == "all"
    assert walked[1] == walked[3] != walked[2]
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**root=*")


def test_hostile_names_do_nothing(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[2]}")
    for path in addresses(ids, 2):
        server.shown(path)
        tab.go(server.own + path)
        tab.page.locator(".flame .frame").nth(2).hover()
        assert tab.page.evaluate("typeof window.attacked") == "undefined"
        assert tab.page.evaluate("document.querySelectorAll('main img, main meta, main svg script').length") == 0
    assert (tab.problems, tab.elsewhere) == ([], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 3840])
def test_the_page_fits_every_screen(new_tab: Any, server: Browser, ids: list[str], width: int, scheme: str) -> None:
    size = {"width": width, "height": 800}
    tab = opened(new_tab, server, f"/c/{ids[0]}", viewport=size, color_scheme=scheme)
    for path in addresses(ids):
        server.shown(path)
        tab.go(server.own + path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(new_tab: Any, server: Browser, ids: list[str], axe: str, scheme: str) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}", bypass_csp=True, color_scheme=scheme)
    for path in addresses(ids):
        server.shown(path)
        tab.go(server.own + path)
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], path


def test_without_scripts_graphs_are_drawn_and_lead_on(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = new_tab(java_script_enabled=False)
    address, token = server.web.address.split("#")
    tab.go(address)
    tab.page.get_by_label("Token").fill(token)
    tab.page.get_by_role("button", name="Open").click()
    path = f"/c/{ids[0]}/flame?of=kernels"
    server.shown(path)
    tab.go(server.own + path)
    tab.page.locator(".flame a.frame", has_text="nccl:all_reduce").first.click()
    tab.page.wait_for_url("**root=*")
    tab.page.get_by_role("link", name="Whole graph").click()
    tab.page.get_by_label("Stacks").select_option("sandwich")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.locator("svg.flame").nth(1).wait_for()
    assert tab.page.locator("svg.flame").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_of_frames_can_be_read_on_every_colour(
    new_tab: Any, server: Browser, ids: list[str], scheme: str
) -> None:
    for path in addresses(ids):
        tab = opened(new_tab, server, path, color_scheme=scheme)
        found = contrasts(tab.page, ".flame .frame text", "rect")
        assert found and min(found) >= ENOUGH_CONTRAST, (path, min(found))
