"""The page of one view: its selectors, what they change, and the command and the values behind it."""

import json
import re
from collections.abc import Iterator

import pytest
from kineto_trace.html.view_charts import MAX_BARS
from kineto_trace.store.parquet_folder import save_columns
from support.trace_files.traces import trace
from support.web.browsing import Browser, browsing
from support.web.model_traces import LAYERS, model_trace, write_lightning


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Of the model, the trace of Lightning, the model's baseline and a trace of one kernel."""
    folder = tmp_path_factory.mktemp("views")
    for name in ("model", "before"):
        save_columns(model_trace(), folder / f"{name}.kineto")
    save_columns(trace({"kernel": [{"name": "gemm", "duration": 5}]}), folder / "bare.kineto")
    lightning = write_lightning(folder / "lightning.json")
    with browsing([folder / "model.kineto", lightning, folder / "before.kineto", folder / "bare.kineto"]) as found:
        yield found


def options(page: str, name: str) -> list[str]:
    """The values that a selector offers."""
    found = re.search(rf'<select name="{re.escape(name)}">(.*?)</select>', page, re.DOTALL)
    return re.findall(r'<option value="([^"]*)"', found[1]) if found else []


def bars(page: str) -> list[str]:
    """The labels of the chart's bars."""
    return re.findall(r'<span class="chart-label">([^<]*)<', page)


def test_an_option_with_a_few_words_is_a_list_of_them(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/view/operators?set.group_by=name%2Bshape").text
    assert options(page, "set.group_by")[:3] == ["", "name", "name+shape"]
    assert '<option value="name+shape" selected>' in page and "default: name</option>" in page
    assert options(page, "set.stacks") == ["", "true", "false"]
    assert options(browser.shown(f"/c/{ids[0]}/view/idle_gaps").text, "set.cause")[1:3] == ["host", "synchronisation"]
    assert 'name="set.limit"' in browser.shown(f"/c/{ids[0]}/view/idle_gaps").text


def test_figures_by_the_rules_of_another_tool_are_on_the_page_in_json_and_csv(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[1]}/view/modules?compat=plugin").text
    assert options(page, "compat") == ["", "plugin"]
    assert "kinetoctl report --view modules --compat plugin" in page
    for kind in ("json", "csv"):
        assert f'href="/c/{ids[1]}/view/modules.{kind}?compat=plugin"' in page
        text = browser.ask(f"/c/{ids[1]}/view/modules.{kind}?compat=plugin").text
        assert ("net/net.0" in text, "torch.nn" in text) == (True, False), kind
    assert "torch.nn.Sequential: net" in browser.ask(f"/c/{ids[1]}/view/modules.json").text


def test_a_comparison_beside_figures_of_another_tool_says_that_it_follows_other_rules(
    browser: Browser, ids: list[str]
) -> None:
    address = f"/c/{ids[0]}/view/operators?base={ids[2]}"
    assert "the comparison uses kinetod&#39;s own rules" in browser.shown(f"{address}&compat=plugin").text
    assert "own rules" not in browser.shown(address).text


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("compat=nsys", "compat must be one of plugin; got &#39;nsys&#39;"),
        ("chart=path", "chart must be one of device_self_us, host_self_us, device_total_us"),
        ("bars=many", "bars must be a whole number, not &#39;many&#39;"),
    ],
)
def test_words_that_a_field_does_not_take_are_answered_with_those_it_takes(
    browser: Browser, ids: list[str], query: str, said: str
) -> None:
    found = browser.ask(f"/c/{ids[0]}/view/modules?{query}")
    assert (found.status, said in found.text) == (400, True)


def test_a_view_without_figures_of_another_tool_has_no_such_field(browser: Browser, ids: list[str]) -> None:
    assert options(browser.shown(f"/c/{ids[0]}/view/call_tree").text, "compat") == []
    found = browser.ask(f"/c/{ids[0]}/view/call_tree?compat=plugin")
    assert (found.status, "compat cannot be used on this page" in found.text) == (400, True)


def test_a_chart_can_be_of_another_column_with_its_largest_values_first(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/view/modules?chart=device_total_us").text
    assert bars(page)[:3] == ["Net_0", "Net_0/Head_0", "Net_0/Encoder_0"]
    assert 'aria-label="Chart of device total in µs"' in page
    assert options(page, "chart")[1:4] == ["device_self_us", "host_self_us", "device_total_us"]
    assert f'href="/c/{ids[0]}/view/modules.json"' in page


def test_as_many_bars_are_drawn_as_are_asked_for(browser: Browser, ids: list[str]) -> None:
    count = LAYERS + 3
    address = f"/c/{ids[0]}/view/modules"
    page = browser.shown(address).text
    assert (len(bars(page)), f"The first {MAX_BARS} of {count} bars." in page) == (MAX_BARS, True)
    assert options(page, "bars") == ["", "all"]
    for query, drawn in (("bars=all", count), ("bars=200", count), ("bars=5", 5)):
        page = browser.shown(f"{address}?{query}").text
        assert (len(bars(page)), "bars.</p>" in page) == (drawn, drawn < count)
    assert options(browser.shown(f"/c/{ids[1]}/view/modules").text, "bars") == []


@pytest.mark.parametrize(("of", "total"), [("modules", 34_000), ("modules_gpu", 965_000)])
@pytest.mark.parametrize("order", ["merged", "time", "sandwich"])
def test_a_flame_graph_of_modules_alone_is_of_their_host_or_gpu_time(
    browser: Browser, ids: list[str], of: str, total: int, order: str
) -> None:
    page = browser.shown(f"/c/{ids[0]}/flame?of={of}&order={order}").text
    assert "Encoder_0" in page and "aten::" not in page and 'frame module"' in page
    assert f"--set of={of}" in page
    tree = json.loads(browser.ask(f"/c/{ids[0]}/flame.json?of={of}").text)["tree"][0]
    assert tree["total"] == total
    (net,) = tree["children"][0]["children"]
    assert (net["name"], {each["name"] for each in net["children"]}) == ("Net_0", {"Encoder_0", "Head_0"})


def test_two_flame_graphs_of_modules_are_compared_by_module(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/flame?of=modules_gpu&base={ids[2]}").text
    assert "diff --by modules " in page and "Encoder_0" in page


def test_a_trace_without_modules_says_what_records_them(browser: Browser, ids: list[str]) -> None:
    assert "record it with with_modules=True" in browser.shown(f"/c/{ids[3]}/flame?of=modules").text


def test_what_a_page_draws_does_not_change_the_values_behind_it(browser: Browser, ids: list[str]) -> None:
    plain = browser.ask(f"/c/{ids[0]}/view/modules.json").text
    assert not {"chart", "bars"} & json.loads(plain)["modules"].keys()
    assert browser.ask(f"/c/{ids[0]}/view/modules.json?chart=calls&bars=3").status == 400
    assert browser.ask(f"/c/{ids[0]}/view/modules.json?chart=operators&bars=3").text == plain
