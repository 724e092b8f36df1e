"""Comparisons in a real browser: charts of both traces, the tree of differences, one rank beside another."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing
from support.web.hostile_trace import write_hostile
from support.web.tabs import entered

pytestmark = pytest.mark.slow

VIEWS = (
    "diff_step_times",
    "diff_operators",
    "diff_kernel_names",
    "diff_modules",
    "diff_call_paths",
    "diff_tree",
    "diff_tree_operators",
    "step_phases",
    "gpu_annotations",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("comparisons")
    job = folder / "job"
    job.mkdir()
    for rank in range(2):
        events = json.loads(synthetic.text(8_000, rank=rank))
        for event in events["traceEvents"]:
            if rank and event.get("cat") == "kernel" and "nvjet" in event["name"]:
                event["dur"] *= 2
        (job / f"rank{rank}.json").write_text(json.dumps(events))
    with browsing([job, write_hostile(folder / "hostile.json")]) as found:
        yield found


@pytest.fixture(scope="module")
def ids(server: Browser) -> list[str]:
    """Of the job and the hostile trace."""
    return re.findall(r'href="/c/(\w+)"', server.ask("/").text)


def address(server: Browser, trace: str, view: str) -> str:
    """The page of rank 1 beside rank 0, computed."""
    found = f"/c/{trace}/view/{view}?rank=1&base={trace}&base_rank=0"
    server.shown(found)
    return f"{server.own}{found}"


def test_both_traces_and_their_differences_are_drawn_without_errors(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    tab = entered(new_tab, server)
    for view in VIEWS:
        tab.go(address(server, ids[0], view))
        assert tab.page.locator(".chart-title").all_inner_texts()[0].startswith("Both traces"), view
        box = tab.page.locator(".chart-row rect.series-0").first.bounding_box()
        assert box and box["width"] > 1, view
    assert (tab.problems, tab.elsewhere) == ([], [])


def test_hostile_names_beside_each_other_do_nothing(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = entered(new_tab, server)
    for view in VIEWS:
        path = f"/c/{ids[1]}/view/{view}?base={ids[0]}&base_rank=1"
        server.shown(path)
        tab.go(f"{server.own}{path}")
        assert tab.page.evaluate("typeof window.attacked") == "undefined", view
        assert tab.page.evaluate("document.querySelectorAll('main img, main script, main meta').length") == 0, view
    assert (tab.problems, tab.elsewhere) == ([], [])


@pytest.mark.parametrize("script", [True, False])
def test_the_tree_is_walked_down_and_up_by_links(new_tab: Any, server: Browser, ids: list[str], script: bool) -> None:
    tab = entered(new_tab, server)
    top = address(server, ids[0], "diff_tree")
    cookies = tab.page.context.cookies()
    page = tab.page
    if not script:
        plain = new_tab(java_script_enabled=False)
        plain.page.context.add_cookies(cookies)
        page = plain.page
    page.goto(top)
    link = page.locator("a.inside").first
    path = link.get_attribute("aria-label").removeprefix("inside ")
    server.shown(link.get_attribute("href"))
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**set.path={path}")
    assert page.locator("main table tbody tr").first.locator("td").first.inner_text() == path
    page.locator(".crumbs a", has_text="whole").click()
    page.wait_for_url("**set.path=0")
    page.locator("a.inside").first.wait_for()


def test_a_click_on_a_row_or_a_bar_of_the_tree_goes_down(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = entered(new_tab, server)
    top = address(server, ids[0], "diff_tree")
    tab.go(top)
    row = tab.page.locator("tr:has(a.inside)").first
    path = row.locator("td").first.inner_text()
    row.locator("td").nth(2).click()
    tab.page.wait_for_url(f"**set.path={path}")
    tab.go(top)
    tab.page.locator(".chart-row a rect.series-0").first.click()
    tab.page.wait_for_url(f"**set.path={path}")
    assert tab.problems == []


def test_a_rank_is_chosen_as_the_baseline_of_another(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = entered(new_tab, server)
    address(server, ids[0], "diff_kernel_names")
    for query in ("", f"?rank=1&base={ids[0]}"):  # or what is chosen there may be gone: see `opened`
        server.shown(f"/c/{ids[0]}/view/diff_kernel_names{query}")
    tab.go(f"{server.own}/c/{ids[0]}/view/diff_kernel_names")
    tab.page.locator("select[name=rank]").select_option("1")
    tab.page.locator("select[name=base]").select_option(label="same trace, another rank")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.get_by_label("Baseline rank").select_option("0")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**base_rank=0**")
    first = tab.page.locator("main table tbody tr").first
    first.filter(has_text="slower").filter(has_text="nvjet").wait_for()
    assert "--rank 1 --base-rank 0" in tab.page.locator(".behind").inner_text()
    assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_comparisons_fit_every_screen(new_tab: Any, server: Browser, ids: list[str], width: int, scheme: str) -> None:
    tab = entered(new_tab, server, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for view in VIEWS:
        tab.go(address(server, ids[0], view))
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_comparisons_are_accessible(new_tab: Any, server: Browser, ids: list[str], axe: str, scheme: str) -> None:
    tab = entered(new_tab, server, bypass_csp=True, color_scheme=scheme)
    for view in VIEWS:
        tab.go(address(server, ids[0], view))
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], view
