"""The page of one view in a real browser: its selectors, and tables whose rows fold."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kineto_trace.store.parquet_folder import save_columns
from support.web.browsing import Browser, browsing
from support.web.hostile_trace import write_hostile
from support.web.model_traces import LAYERS, model_trace, write_lightning
from support.web.tabs import opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("views")
    save_columns(model_trace(), folder / "model.kineto")
    lightning, hostile = write_lightning(folder / "lightning.json"), write_hostile(folder / "hostile.json")
    with browsing([folder / "model.kineto", lightning, hostile]) as found:
        yield found


@pytest.fixture(scope="module")
def ids(server: Browser) -> list[str]:
    """Of the model, the trace of Lightning and the hostile one."""
    return re.findall(r'href="/c/(\w+)"', server.ask("/").text)


def shown(tab: Any) -> list[str]:
    """The names in the rows that are seen."""
    return [text.strip() for text in tab.page.locator("tbody tr:visible td.branch").all_inner_texts()]


LAYERS_IN_ORDER = [f"Layer_{n}" for n in range(LAYERS)]


def test_lists_of_values_and_figures_of_another_tool_are_chosen_on_the_page(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/view/operators")
    tab.page.get_by_label("Group by").select_option("name+shape")
    tab.page.get_by_label("Figures by").select_option("plugin")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**compat=plugin**")
    assert "set.group_by=name%2Bshape" in tab.page.url
    assert "--compat plugin --set group_by=name+shape" in tab.page.locator("footer").inner_text()
    assert tab.page.get_by_label("Group by").input_value() == "name+shape"
    tab.go(f"{server.own}/c/{ids[1]}/view/modules?compat=plugin")
    tab.page.locator("tbody tr").first.wait_for()
    assert shown(tab) == ["net", "net.0"]
    assert tab.problems == []


def test_operators_are_grouped_by_kind_of_work_with_cumulative_shares(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/view/operators")
    tab.page.get_by_label("Group by").select_option("type")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**set.group_by=type**")
    tab.page.locator("tbody tr").first.wait_for()
    assert tab.page.locator("tbody tr td:nth-child(2)").all_inner_texts() == ["matrix product", "other"]
    assert tab.page.get_by_role("button", name="Cumulative").count() == 1
    assert tab.problems == []


def test_another_column_and_more_bars_are_drawn(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/view/operators")
    assert tab.page.locator(".chart-row svg").count() == 24
    tab.page.get_by_role("combobox", name="Chart").select_option("device_total_us")
    tab.page.get_by_label("Bars").select_option("all")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**chart=device_total_us&bars=all**")
    tab.page.locator(".chart-row").first.wait_for()
    assert tab.page.locator(".chart-row svg").count() == LAYERS + 2
    assert set(tab.page.locator(".chart-label").all_inner_texts()[:2]) == {"aten::linear", "aten::addmm"}
    assert tab.problems == []


def test_rows_of_a_tree_fold_and_unfold_by_mouse_and_keyboard(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/view/modules")
    assert shown(tab) == ["Net_0", "Encoder_0", *LAYERS_IN_ORDER, "Head_0"]
    encoder = tab.page.get_by_role("button", name="Rows below Encoder_0")
    encoder.click()
    assert (encoder.get_attribute("aria-expanded"), shown(tab)) == ("false", ["Net_0", "Encoder_0", "Head_0"])
    encoder.focus()
    tab.page.keyboard.press("Enter")
    assert (encoder.get_attribute("aria-expanded"), len(shown(tab))) == ("true", LAYERS + 3)
    tab.page.keyboard.press("ArrowLeft")
    assert shown(tab) == ["Net_0", "Encoder_0", "Head_0"]
    tab.page.keyboard.press("ArrowRight")
    assert len(shown(tab)) == LAYERS + 3
    tab.page.get_by_role("button", name="Fold all", exact=True).click()
    assert shown(tab) == ["Net_0"]
    tab.page.get_by_role("button", name="Rows below Net_0").click()
    assert shown(tab) == ["Net_0", "Encoder_0", "Head_0"]  # what was folded inside stays so
    tab.page.get_by_role("button", name="Unfold all").click()
    assert len(shown(tab)) == LAYERS + 3
    assert tab.problems == []


def test_a_tree_is_sorted_among_siblings_and_a_filter_shows_matches_below_what_has_them(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/view/modules")
    tab.page.get_by_role("button", name="Device total", exact=True).click()
    assert shown(tab) == ["Net_0", "Head_0", "Encoder_0", *LAYERS_IN_ORDER[::-1]]
    tab.page.get_by_role("button", name="Rows below Encoder_0").click()
    search = tab.page.get_by_label("Filter the rows")
    search.fill("layer_7")
    assert shown(tab) == ["Net_0", "Encoder_0", "Layer_7"]
    search.fill("")
    assert shown(tab) == ["Net_0", "Head_0", "Encoder_0"]
    assert tab.problems == []


def test_without_scripts_all_rows_of_a_tree_are_shown(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = new_tab(java_script_enabled=False)
    address, token = server.web.address.split("#")
    tab.go(address)
    tab.page.get_by_label("Token").fill(token)
    tab.page.get_by_role("button", name="Open").click()
    server.shown(f"/c/{ids[0]}/view/modules")
    tab.go(f"{server.own}/c/{ids[0]}/view/modules")
    assert shown(tab) == ["Net_0", "Encoder_0", *LAYERS_IN_ORDER, "Head_0"]
    assert tab.page.locator("tbody button").count() == 0


def test_a_flame_graph_of_modules_is_chosen_and_zoomed(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[0]}/flame")
    tab.page.get_by_role("combobox", name="Of").select_option("modules_gpu")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**of=modules_gpu**")
    frame = tab.page.locator(".flame .module", has_text="Head_0").first
    frame.hover()
    assert "Head_0: " in tab.page.locator("#flame-about").inner_text()
    frame.click()
    tab.page.wait_for_url("**root=*")
    tab.page.get_by_role("link", name="Whole graph").wait_for()
    assert "Head_0" in tab.page.locator("main .crumbs").last.inner_text()
    assert tab.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_trees_are_accessible_and_fit_a_phone(
    new_tab: Any, server: Browser, ids: list[str], axe: str, scheme: str
) -> None:
    for address in (f"/c/{ids[0]}/view/modules?chart=device_total_us", f"/c/{ids[2]}/view/call_tree"):
        tab = opened(
            new_tab, server, address, bypass_csp=True, color_scheme=scheme, viewport={"width": 360, "height": 800}
        )
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.page.locator("button.fold").count() > 0
        assert tab.page.evaluate("typeof window.attacked") == "undefined"
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], address
        assert tab.problems == []
