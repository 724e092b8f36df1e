"""The page of a memory snapshot: its figures, the map, a block, and where it is linked."""

import json
import pickle
import re
from collections.abc import Iterator
from html import escape, unescape
from typing import Any

import pytest
from kineto_trace.store.parquet_folder import save_columns
from support.targets.memory_snapshots import BASE, MIB, snapshot, write_snapshot
from support.trace_files.traces import trace
from support.web.browsing import Browser, browsing

HOSTILE = "\"'><img src=x onerror=alert(1)>\u202e"


def hostile() -> Any:
    value = snapshot()
    for block in value["segments"][0]["blocks"]:
        block["frames"] = [{"filename": f"/x/{HOSTILE}.py", "line": 1, "name": HOSTILE}]
    value["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = HOSTILE
    return value


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("snapshots")
    own = write_snapshot(folder / "own.memory_snapshot.pickle")
    ranks = folder / "ranks"
    ranks.mkdir()
    save_columns(trace({"kernel": [{"name": "gemm", "duration": 5}]}), ranks / "rank0.kineto")
    for rank in range(2):
        write_snapshot(ranks / f"rank{rank}.memory_snapshot.pickle")
    save_columns(trace({"kernel": [{"name": "gemm", "duration": 5}]}), folder / "bare.kineto")
    evil = folder / "evil.memory_snapshot.pickle"
    evil.write_bytes(pickle.dumps(print, protocol=4))
    attack = write_snapshot(folder / "attack.memory_snapshot.pickle", hostile())
    with browsing([own, ranks, folder / "bare.kineto", evil, attack]) as found:
        yield found


@pytest.fixture(scope="module")
def ids(browser: Browser) -> dict[str, str]:
    found = re.findall(r'href="/c/(\w+)"', browser.ask("/").text)
    return dict(zip(("own", "ranks", "bare", "evil", "attack"), found, strict=True))


def test_a_snapshot_that_is_named_alone_has_only_this_page(browser: Browser, ids: dict[str, str]) -> None:
    found = browser.ask(f"/c/{ids['own']}")
    assert (found.status, found.headers["Location"]) == (303, f"/c/{ids['own']}/snapshot")


def test_the_page_shows_figures_map_stacks_curve_and_failures(browser: Browser, ids: dict[str, str]) -> None:
    page = browser.shown(f"/c/{ids['own']}/snapshot").text
    assert "GPU0: 22 MiB reserved in 2 segments, 8 MiB of it allocated" in page
    assert "<title>4 MiB in use: step (train.py:12)</title>" in page
    assert "out of memory: 900.0 MiB requested" in page
    for heading in ("Segments", "Blocks in use by stack", "Held over time", "Out of memory"):
        assert re.search(f"<h[23]>{heading}</h[23]>", page)
    command = "kinetoctl report --view snapshot_devices --view snapshot_stacks --view snapshot_ooms"
    assert command in page


def test_a_block_leads_to_its_stack_and_its_segment(browser: Browser, ids: dict[str, str]) -> None:
    path = f"/c/{ids['own']}/snapshot"
    link = next(each for each in re.findall(r'href="([^"]*block=[^"]*)"', browser.shown(path).text))
    assert link == f"{path}?block=0-{BASE:#x}#block"
    page = browser.shown(link.partition("#")[0]).text
    frames = re.findall(r"<li><code>(.*?)</code>", page)
    assert frames[2:] == ["step (/home/ada/train.py:12)", "main (/home/ada/train.py:40)"]
    assert f'href="{path}?segment=0-{BASE:#x}#map"' in page


def test_a_segment_alone_lists_its_blocks(browser: Browser, ids: dict[str, str]) -> None:
    path = f"/c/{ids['own']}/snapshot?segment=0-{BASE:#x}"
    page = browser.shown(path).text
    assert page.count('<svg viewBox="0 0 100 1"') == 1
    assert f"segment=0-{BASE:#x}&amp;block=0-{BASE + 6 * MIB:#x}#block" in page
    rows = json.loads(browser.ask(path.replace("/snapshot?", "/snapshot.json?")).text)["snapshot_blocks"]["rows"]
    assert [row["block_bytes"] for row in rows] == [4 * MIB, 2 * MIB, 4 * MIB, 10 * MIB]
    assert "The first 2 of 4 blocks." in browser.shown(f"{path}&limit=2").text


def test_processes_are_chosen_by_name(browser: Browser, ids: dict[str, str]) -> None:
    page = browser.shown(f"/c/{ids['ranks']}/snapshot?process=rank1").text
    assert '<option value="rank0">rank0</option>' in page
    assert '<option value="rank1" selected>' in page
    assert f"process=rank1&amp;block=0-{BASE:#x}" in page
    assert (
        "there is no snapshot of x; available: rank0, rank1"
        in browser.shown(f"/c/{ids['ranks']}/snapshot?process=x").text
    )


def test_pages_of_traces_with_snapshots_lead_to_them(browser: Browser, ids: dict[str, str]) -> None:
    for page in ("", "/memory"):
        assert f'href="/c/{ids["ranks"]}/snapshot"' in browser.shown(f"/c/{ids['ranks']}{page}").text
        assert '/snapshot"' not in browser.shown(f"/c/{ids['bare']}{page}").text


def test_a_trace_without_one_says_how_to_take_it(browser: Browser, ids: dict[str, str]) -> None:
    for page in ("snapshot", "snapshot.json"):
        found = browser.ask(f"/c/{ids['bare']}/{page}")
        assert (found.status, "take one with `kinetoctl memory`" in found.text) == (404, True)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("block=x", "block must be a device and an address such as 0-0x7f0000000000, not 'x'"),
        ("segment=0-0x12345", "GPU0 has no segment at 0x12345 in this snapshot"),
        ("block=1-0x1", "GPU1 has no block at 0x1 in this snapshot"),
    ],
)
def test_what_is_not_in_the_snapshot_is_said(browser: Browser, ids: dict[str, str], query: str, said: str) -> None:
    assert said in unescape(browser.shown(f"/c/{ids['own']}/snapshot?{query}").text)


def test_a_pickle_that_is_no_plain_data_is_refused(browser: Browser, ids: dict[str, str]) -> None:
    assert "is not plain data: it imports something" in browser.shown(f"/c/{ids['evil']}/snapshot").text


def test_names_of_a_hostile_snapshot_are_text(browser: Browser, ids: dict[str, str]) -> None:
    for query in ("", f"?block=0-{BASE:#x}", f"?segment=0-{BASE:#x}"):
        page = browser.shown(f"/c/{ids['attack']}/snapshot{query}").text
        assert "<img" not in page
        assert escape("><img") in page
