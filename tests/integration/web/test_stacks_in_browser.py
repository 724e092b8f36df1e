"""Where processes stand, in a real browser: from the list of processes to the verdict, without JavaScript as well."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import Daemon
from support.service.fake_profiler import FakeProfiler, serve
from support.service.stacks import hanging as hanging_job
from support.service.stacks import read
from support.targets.hung_programs import hanging
from support.waiting import until
from support.web.browsing import Browser, browsing
from support.web.tabs import entered

pytestmark = pytest.mark.slow


def without_scripts(new_tab: Any, server: Browser) -> Any:
    """A tab in which no script runs, with the session of the client."""
    tab = new_tab(java_script_enabled=False)
    name, _, value = server.cookie.partition("=")
    tab.page.context.add_cookies([{"name": name, "value": value, "url": server.own}])
    return tab


def test_a_hanging_process_is_looked_at_by_a_click_and_stands_still_at_the_next_look(
    daemon: Daemon, new_tab: Any
) -> None:
    with hanging("lock") as pid, browsing(address=daemon.address) as server:
        page = without_scripts(new_tab, server).page
        page.goto(f"{server.own}/live?all=1")
        page.get_by_role("link", name=f"What is it doing? Process {pid}", exact=True).click()

        def waits() -> bool:
            page.get_by_role("button", name="Look again").click()
            verdict = page.get_by_role("heading", level=1).inner_text()
            return "waits for a lock, with no other thread in the process, in hangs" in verdict

        until(waits, "the verdict says that it waits")
        page.get_by_role("button", name="Look again").click()
        assert re.search(r"main thread · waits for a lock.*at every look for ", page.locator("main").inner_text())
        assert "held.acquire()" in page.locator("ol.frames li").first.inner_text()
        assert f"stacks --address {daemon.address} {pid}" in page.locator("footer").inner_text()


@pytest.fixture(scope="module")
def server() -> Iterator[Browser]:
    """A job that hangs, and a process that could not be read."""
    job = [*hanging_job(), read(None, None, pid=77, reason="you may not read it")]
    profiler = FakeProfiler(stacks=[job], pages=[pb.ListCapturesResponse()], processes=[each.process for each in job])
    with serve(profiler) as daemon, browsing(address=daemon.address) as found:
        yield found


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_where_a_job_stands_is_accessible_and_fits_every_screen(
    new_tab: Any, server: Browser, axe: str, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 800}
    tab = entered(new_tab, server, "Captures", bypass_csp=True, color_scheme=scheme, viewport=viewport)
    for path in ("/live", "/live/stacks?rank=all"):
        tab.go(server.own + path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path
        for folded in tab.page.locator("summary").all():
            folded.click()
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], path


def test_idle_threads_are_unfolded_by_the_keyboard_and_the_verdict_is_the_largest_text(
    new_tab: Any, server: Browser
) -> None:
    tab = entered(new_tab, server, "Captures")
    tab.go(f"{server.own}/live")
    tab.page.get_by_role("link", name="every rank").press("Enter")
    tab.page.wait_for_url("**/live/stacks?rank=all")
    idle = tab.page.get_by_text("pt_nccl_watchdg").first
    assert not idle.is_visible()
    tab.page.locator("summary").first.press("Enter")
    assert idle.is_visible()
    sizes = "[...document.querySelectorAll('main *')].map((each) => parseFloat(getComputedStyle(each).fontSize))"
    verdict = "parseFloat(getComputedStyle(document.querySelector('h1')).fontSize)"
    assert tab.page.evaluate(f"{verdict} === Math.max(...{sizes})")
    assert (tab.problems, tab.elsewhere) == ([], [])
