"""The lists of several hosts in a real browser: who does not answer is read above them, whatever the screen."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.host_targets import Place
from kinetoctl.web import application
from kinetoctl.web.shared.fleet_hosts import FleetDaemons, FleetHosts, HostSource
from support.service.captures import done_target, process
from support.service.fake_profiler import FakeProfiler, serve
from support.web.browsing import Browser, browsing
from support.web.tabs import entered

pytestmark = pytest.mark.slow

ATTACK = '<img src=x onerror="window.attacked=1">'
OWN = "20260101-000001-000-aaaaaa"
SILENT = 12


@pytest.fixture(scope="module")
def server() -> Iterator[Browser]:
    """One host that answers, with a hostile name, and others that do not."""
    capture = pb.Capture(id=OWN, created_ns=time.time_ns(), status=pb.CAPTURE_STATUS_DONE, targets=[done_target()])
    profiler = FakeProfiler(pages=[pb.ListCapturesResponse(captures=[capture])], processes=[process()])
    with pytest.MonkeyPatch.context() as patch, serve(profiler) as daemon:
        places = [Place(ATTACK, daemon.address), *(Place(f"gpu-{n}", f"unix:/nowhere/{n}") for n in range(SILENT))]
        with closing(FleetHosts(HostSource(find=lambda: places, name="hosts"))) as hosts:
            patch.setattr(application, "OneDaemon", lambda *_: FleetDaemons(hosts, (), 30.0))
            with browsing([]) as found:
                yield found


@pytest.mark.parametrize("path", ["/", "/live"])
def test_hosts_that_do_not_answer_are_named_above_the_list_of_the_others(
    new_tab: Any, server: Browser, path: str
) -> None:
    tab = entered(new_tab, server, "Captures")
    tab.go(server.own + path)
    box = tab.page.get_by_role("region", name="Hosts without an answer")
    assert f"{SILENT} hosts are missing below" in box.inner_text()
    tops = "['.unanswered', 'tbody tr'].map((each) => document.querySelector(each).getBoundingClientRect().top)"
    above, below = tab.page.evaluate(tops)
    assert above < below
    assert not box.get_by_text("gpu-9:").is_visible()
    box.get_by_text(f"{SILENT - 8} more").click()
    assert box.get_by_text("gpu-9:").is_visible()
    assert ATTACK in tab.page.locator("tbody").inner_text()
    assert tab.page.evaluate("typeof window.attacked") == "undefined"
    assert (tab.problems, tab.elsewhere) == ([], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lists_of_hosts_are_accessible_and_fit_a_telephone(
    new_tab: Any, server: Browser, axe: str, scheme: str
) -> None:
    viewport = {"width": 360, "height": 800}
    tab = entered(new_tab, server, "Captures", bypass_csp=True, color_scheme=scheme, viewport=viewport)
    for path in ("/", "/live"):
        tab.go(server.own + path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], path
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], path
