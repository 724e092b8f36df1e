"""The tree of differences as a page: down into a node and back, without a script."""

import json
import re
from collections.abc import Iterator
from html import unescape

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Of a job and its baseline."""
    folder = tmp_path_factory.mktemp("tree")
    job = folder / "job"
    job.mkdir()
    for rank in range(2):
        (job / f"rank{rank}.json").write_text(synthetic.text(8_000, rank=rank))
    (folder / "before.json").write_text(synthetic.text(8_000))
    with browsing([job, folder / "before.json"]) as found:
        yield found


def test_a_row_leads_into_its_node_and_back(browser: Browser, ids: list[str]) -> None:
    whole = f"/c/{ids[0]}/view/diff_tree?rank=1&base={ids[1]}&base_rank=0&limit=100"
    page = unescape(browser.shown(whole).text)
    (down, path), *_ = re.findall(r'<a class="inside" href="([^"]+set\.path=(0-\d+))"', page)
    assert page.count(f'href="{down}"') == 5  # in the table, and at the label and the bars of both charts
    inside = unescape(browser.shown(down).text)
    assert f"kinetoctl diff --by tree --path {path} --rank 1 --base-rank 0" in inside
    assert re.search(rf">whole</a> \S {path} nn\.Module: ", inside)
    (up,) = re.findall(r'<p class="crumbs"><a href="([^"]+set\.path=0)">', inside)
    assert up == f"{whole}&set.path=0"
    assert browser.ask(up).status == 200
    rows = json.loads(browser.ask(down.replace("diff_tree?", "diff_tree.json?")).text)["diff_tree"]["rows"]
    assert [(row["path"], row["depth"]) for row in rows[:2]] == [(path, 1), (f"{path}-0", 2)]


def test_a_node_has_its_operators(browser: Browser, ids: list[str]) -> None:
    page = unescape(browser.shown(f"/c/{ids[0]}/view/diff_tree?rank=1&base={ids[1]}").text)
    (address,) = re.findall(r'href="([^"]+/diff_tree_operators[^"]+)"', page)
    operators = unescape(browser.shown(address).text)
    assert "kinetoctl diff --by ops --path 0 --rank 1" in operators
    assert "aten::addmm" in operators


def test_a_path_that_leads_nowhere_and_a_job_are_explained(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/view/diff_tree?rank=0&base={ids[1]}&set.path=0-999").text
    assert "no node 0-999: node 0 has" in page
    page = browser.shown(f"/c/{ids[0]}/view/diff_tree?base={ids[0]}").text
    assert "cannot compare jobs of several ranks: choose one rank" in page
