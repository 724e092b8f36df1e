"""The page of flame graphs without a browser: what its address chooses, its JSON, its command, and hostile names."""

import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing
from support.web.hostile_trace import ATTACKS, write_hostile


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Of a plain trace, a slower one, the hostile one and a job."""
    folder = tmp_path_factory.mktemp("flame")
    plain, slower, job = folder / "plain.json", folder / "slower.json", folder / "job"
    plain.write_text(synthetic.text(12_000))
    longer = json.loads(synthetic.text(12_000))
    for event in longer["traceEvents"]:
        if event.get("cat") == "kernel" and "nvjet" in event["name"]:
            event["dur"] *= 2
    slower.write_text(json.dumps(longer))
    job.mkdir()
    for rank in range(2):
        (job / f"rank{rank}.json").write_text(synthetic.text(2_000, rank=rank))
    with browsing([plain, slower, write_hostile(folder / "hostile.json"), job]) as found:
        yield found


def values(browser: Browser, address: str) -> Any:
    found = browser.ask(address)
    assert found.status == 200, found.text
    return json.loads(found.text)


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from nodes(child)


@pytest.mark.parametrize("of", ["ops", "kernels", "python"])
@pytest.mark.parametrize("order", ["merged", "time", "sandwich"])
def test_every_graph_is_drawn_with_a_table_beside_it(browser: Browser, ids: list[str], of: str, order: str) -> None:
    text = browser.shown(f"/c/{ids[0]}/flame?of={of}&order={order}").text
    assert text.count('<svg class="flame"') == (2 if order == "sandwich" else 1)
    assert text.count("<tr><td") > 1
    assert f"--set of={of}" in text
    assert "style=" not in text


def test_the_frames_of_the_json_sum_exactly(browser: Browser, ids: list[str]) -> None:
    for of in ("ops", "kernels", "python"):
        for order in ("merged", "time"):
            found = values(browser, f"/c/{ids[0]}/flame.json?of={of}&order={order}")
            for node in nodes(found["tree"][0]):
                assert node["total"] == node["self"] + sum(child["total"] for child in node["children"])


def test_a_frame_leads_to_itself_alone_and_back(browser: Browser, ids: list[str]) -> None:
    text = browser.shown(f"/c/{ids[0]}/flame?of=kernels").text
    address, name = re.findall(r'<a href="([^"]+root=\w+)" class="frame gpu"><title>([^\n]+)', text)[0]
    alone = browser.shown(unescape(address)).text
    assert alone.count("<title>") == 2  # of the page and of the frame
    assert f"<title>{name}\n" in alone
    assert f'<a href="/c/{ids[0]}/flame?of=kernels&amp;order=merged">Whole graph</a>' in alone


def test_a_function_has_its_callers_and_callees(browser: Browser, ids: list[str]) -> None:
    found = values(browser, f"/c/{ids[0]}/flame.json?order=sandwich&focus=aten::addmm")
    up, down = found["tree"]
    assert (up["name"], down["name"]) == ("aten::addmm", "aten::addmm")
    assert up["total"] == down["total"]
    assert "aten::linear" in [child["name"] for child in up["children"]]


def test_a_baseline_gives_every_frame_a_signed_difference_per_step(browser: Browser, ids: list[str]) -> None:
    found = values(browser, f"/c/{ids[1]}/flame.json?of=kernels&base={ids[0]}")
    first = found["functions"][0]
    assert (found["per"], "nvjet" in first["name"]) == ("step", True)
    assert re.fullmatch(r"\+[\d.]+ µs per step \(\+\d+ %\)", first["self_delta_text"]) or first["self_delta"] > 0
    text = browser.shown(f"/c/{ids[1]}/flame?of=kernels&base={ids[0]}").text
    assert 'class="frame more-' in text
    assert "kinetoctl diff --by kernels" in text
    back = browser.shown(f"/c/{ids[0]}/flame?of=kernels&base={ids[1]}").text
    assert 'class="frame less-' in back


def test_a_rank_is_compared_with_another_one_of_its_job(browser: Browser, ids: list[str]) -> None:
    both = f"/c/{ids[3]}/flame{{}}?of=kernels&rank=1&base={ids[3]}&base_rank="
    own, other = (values(browser, both.format(".json") + rank)["functions"] for rank in ("1", "0"))
    assert {each["self_delta"] for each in own} == {0}
    assert any(each["self_delta"] for each in other)
    text = unescape(browser.shown(both.format("") + "0").text)
    assert "kinetoctl diff --by kernels --rank 1 --base-rank 0" in text
    assert re.search(r'href="[^"]*base_rank=0[^"]*root=', text)


def test_ranks_are_summed_unless_one_is_chosen(browser: Browser, ids: list[str]) -> None:
    both, *each = (
        values(browser, f"/c/{ids[3]}/flame.json?of=kernels{choice}")["tree"][0]["total"]
        for choice in ("", "&rank=0", "&rank=1")
    )
    assert both == sum(each)


def test_a_step_and_a_thread_can_be_chosen(browser: Browser, ids: list[str]) -> None:
    whole = values(browser, f"/c/{ids[0]}/flame.json")
    assert len(whole["steps"]) > 2
    step = values(browser, f"/c/{ids[0]}/flame.json?step={whole['steps'][1]}")
    thread = values(browser, f"/c/{ids[0]}/flame.json?thread={whole['threads'][0][0]}")
    totals = [found["tree"][0]["total"] for found in (step, thread, whole)]
    assert totals[0] < totals[1] < totals[2]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("of=gpu", "of must be one of ops, kernels, python"),
        ("order=up", "order must be one of merged, time, sandwich"),
        ("step=one", "step must be a whole number"),
        ("thread=1.5", "thread must be a whole number"),
    ],
)
def test_values_that_there_are_not_are_refused(browser: Browser, ids: list[str], query: str, said: str) -> None:
    found = browser.ask(f"/c/{ids[0]}/flame?{query}")
    assert found.status == 400
    assert said in found.text


def test_a_step_that_is_not_there_is_told(browser: Browser, ids: list[str]) -> None:
    assert "the trace has no step 99999" in browser.shown(f"/c/{ids[0]}/flame?step=99999").text


def test_hostile_names_are_text_in_graphs_tables_and_addresses(browser: Browser, ids: list[str]) -> None:
    for query in ("of=kernels", "of=python&order=time", "order=sandwich", f"of=kernels&base={ids[0]}"):
        text = browser.shown(f"/c/{ids[2]}/flame?{query}").text
        assert ATTACKS[0].replace("<", "&lt;").replace(">", "&gt;")[:20] in text or "attacked" in text
        assert not re.search(r"<script(?! src=\"/static/)|<img|<a href=(?![\"])|onerror=window|<meta http", text)
        assert "\u202e" not in text


def test_the_page_of_a_capture_leads_to_its_flame_graphs(browser: Browser, ids: list[str]) -> None:
    assert f'href="/c/{ids[0]}/flame"' in browser.shown(f"/c/{ids[0]}").text
