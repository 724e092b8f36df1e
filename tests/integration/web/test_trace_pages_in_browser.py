"""The pages of ranks, memory and counters in a real browser: drawn, without errors, accessible, on every screen."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing
from support.web.contrast import ENOUGH_CONTRAST, contrasts
from support.web.hostile_trace import write_hostile
from support.web.tabs import entered

pytestmark = pytest.mark.slow

PAGES = ("ranks", "memory", "counters")
HEIGHTS = "() => [...document.querySelectorAll('svg text.axis')].map((text) => text.getBoundingClientRect().height)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("pages")
    job = folder / "job"
    job.mkdir()
    for rank in range(2):
        (job / f"rank{rank}.json").write_text(synthetic.text(8_000, rank=rank))
    with browsing([job, write_hostile(folder / "hostile.json")]) as found:
        yield found


@pytest.fixture(scope="module")
def ids(server: Browser) -> list[str]:
    """Of the job and the hostile trace."""
    return re.findall(r'href="/c/(\w+)"', server.ask("/").text)


def test_pages_are_drawn_without_errors_and_hostile_names_do_nothing(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    tab = entered(new_tab, server)
    for trace in ids:
        for name in PAGES:
            server.shown(f"/c/{trace}/{name}")
            tab.go(f"{server.own}/c/{trace}/{name}")
            assert tab.page.locator("main svg").count() > 0, name
            assert tab.page.evaluate("typeof window.attacked") == "undefined", name
            assert tab.page.evaluate("document.querySelectorAll('main img, main script, main meta').length") == 0, name
    assert (tab.problems, tab.elsewhere) == ([], [])


def test_the_map_leads_to_a_rank_and_shows_what_is_chosen(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = entered(new_tab, server)
    for query in ("", "?value=waiting_us"):
        server.shown(f"/c/{ids[0]}/ranks{query}")
    tab.go(f"{server.own}/c/{ids[0]}/ranks")
    tab.page.get_by_label("Colour").select_option("waiting_us")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**value=waiting_us**")
    tab.page.get_by_role("heading", name="Time waiting for other ranks").wait_for()
    tab.go(f"{server.own}/c/{ids[0]}/ranks")
    tab.page.locator("svg.heat a[href*='step_breakdown?rank=1']").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/view/step_breakdown?rank=1")
    assert tab.problems == []


@pytest.fixture
def memory(new_tab: Any, server: Browser, ids: list[str]) -> Any:
    """The page of the memory of rank 0."""
    tab = entered(new_tab, server)
    server.shown(f"/c/{ids[0]}/memory?rank=0")
    tab.go(f"{server.own}/c/{ids[0]}/memory?rank=0")
    tab.page.locator("#memory-how").wait_for()
    return tab


def dragged(page: Any, start: float, end: float) -> None:
    """Drags over the first curve, from and to these shares of its width."""
    svg = page.locator("figure.curve svg").first
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 60)
    page.mouse.up()


def test_a_drag_over_the_curve_restricts_the_tables_and_a_link_takes_it_back(memory: Any) -> None:
    page = memory.page
    dragged(page, 0.7, 0.4)
    page.wait_for_url(re.compile(r"t0=\d{5,}&t1=\d{5,}"))
    start, end = (int(page.locator(f"input[name={name}]").input_value()) for name in ("t0", "t1"))
    assert start < end
    page.get_by_role("link", name="Show the whole time").click()
    page.wait_for_url(re.compile(r"memory\?rank=0"))
    page.get_by_role("heading", name="Every block").wait_for()
    assert page.locator("input[name=t0]").input_value() == ""
    assert memory.problems == []


def test_a_click_in_the_curve_shows_what_was_held_then(memory: Any) -> None:
    page = memory.page
    dragged(page, 0.5, 0.5)
    page.wait_for_url(re.compile(r"[?&]at=\d{5,}"))
    page.get_by_role("link", name="Show the peak").wait_for()
    page.locator("figure.curve text", has_text="snapshot").wait_for()
    assert page.get_by_role("heading", name="What was held at").count() == 1
    assert memory.problems == []


def test_a_moment_is_chosen_by_keyboard(memory: Any) -> None:
    page = memory.page
    origin = int(page.locator("figure.curve").first.get_attribute("data-origin"))
    page.get_by_label("Snapshot ns").fill(str(origin + 1_000_000))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"at={origin + 1_000_000}"))
    page.get_by_role("link", name="Show the peak").wait_for()
    assert page.get_by_label("Snapshot ns").input_value() == str(origin + 1_000_000)
    assert memory.problems == []


def test_a_row_of_the_blocks_is_marked_in_its_curve(memory: Any) -> None:
    page = memory.page
    rows = page.locator("tr[data-curve]")
    rows.last.hover()
    assert page.locator("rect.block-time").count() == 1
    first = page.locator("rect.block-time").get_attribute("x")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    assert rows.nth(1).evaluate("row => row === document.activeElement")
    assert page.locator("rect.block-time").count() == 1
    assert page.locator("rect.block-time").get_attribute("x") != first
    assert memory.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_fit_every_screen(new_tab: Any, server: Browser, ids: list[str], width: int, scheme: str) -> None:
    tab = entered(new_tab, server, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for name in PAGES:
        server.shown(f"/c/{ids[0]}/{name}")
        tab.go(f"{server.own}/c/{ids[0]}/{name}")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(new_tab: Any, server: Browser, ids: list[str], axe: str, scheme: str) -> None:
    tab = entered(new_tab, server, bypass_csp=True, color_scheme=scheme)
    for name in PAGES:
        server.shown(f"/c/{ids[0]}/{name}")
        tab.go(f"{server.own}/c/{ids[0]}/{name}")
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], name


def test_a_baseline_is_chosen_and_a_row_opens_its_place_in_the_timeline(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    tab = entered(new_tab, server)
    server.shown(f"/c/{ids[0]}/view/profiler_steps")
    tab.go(f"{server.own}/c/{ids[0]}/view/profiler_steps")
    tab.page.get_by_label("Baseline").select_option(ids[1])
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url(f"**base={ids[1]}**")
    tab.page.get_by_role("heading", name="Profiler steps compared with").wait_for()
    tab.page.get_by_role("link", name="timeline", exact=True).first.click()
    tab.page.wait_for_url("**/timeline?rank=0&t0=**")
    tab.page.get_by_role("link", name="Show the whole trace").wait_for()
    assert tab.page.locator("h1").inner_text() == "Timeline"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("dark", 500)])
def test_axes_of_charts_over_time_are_legible(
    new_tab: Any, server: Browser, ids: list[str], scheme: str, width: int
) -> None:
    tab = entered(new_tab, server, color_scheme=scheme, viewport={"width": width, "height": 900})
    for name in ("memory", "counters"):
        server.shown(f"/c/{ids[0]}/{name}")
        tab.go(f"{server.own}/c/{ids[0]}/{name}")
        assert min(contrasts(tab.page, "svg text.axis")) >= ENOUGH_CONTRAST, name
        assert min(tab.page.evaluate(HEIGHTS)) >= 8, name
