"""The page with a real daemon: its captures, its processes, and a capture that is started by a click."""

import os
import re
from typing import Any

import pytest
from kineto_trace.view_api.cell_texts import view_title
from support.service.cli import wait_for_agent
from support.service.daemon import Daemon
from support.targets.programs import crunching, program
from support.waiting import scaled_option
from support.web.browsing import browsing

pytestmark = pytest.mark.slow


def test_a_process_is_traced_by_a_click_and_its_verdict_is_shown(
    daemon: Daemon, new_tab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", daemon.client_environ()["PYTHONPATH"])
    with program(crunching(), daemon, quiet=True) as child, browsing(address=daemon.address) as server:
        wait_for_agent(daemon, child.pid)
        tab = new_tab()
        tab.go(server.web.address)
        tab.page.get_by_text("There are no captures yet").wait_for()
        tab.page.get_by_role("link", name="Processes").click()
        tab.page.get_by_label("Duration").fill(scaled_option(0.5))
        tab.page.keyboard.press("Enter")  # chooses no process
        tab.page.get_by_role("button", name=f"Trace process {child.pid}", exact=True).click()
        tab.page.wait_for_url("**/c/**")
        tab.page.locator("h1 .status", has_text="DONE").wait_for()
        tab.page.get_by_role("heading", name="Look closer").wait_for()
        assert tab.page.locator("main > h1 + .verdict").inner_text().strip()  # the page begins with the answer
        tab.page.get_by_text("What was recorded, and what it cost").click()
        assert "dropped" in tab.page.locator("main").inner_text()
        assert tab.page.locator("h1 .status").inner_text() == "DONE"
        tab.page.get_by_text(re.compile(r"All \d+ views")).click()
        tab.page.get_by_label("Search views").fill("samples python")
        assert tab.page.get_by_role("link", name=view_title("roofline"), exact=True).count() == 0
        tab.page.get_by_role("link", name=view_title("python_samples"), exact=True).click()
        tab.page.locator("td", has_text="crunch_numbers").first.wait_for()
        capture_id = re.findall(r'href="/c/([\w-]+)"', server.ask("/").text)[0]
        assert server.shown(f"/c/{capture_id}/timeline/trace").status == 200
        tab.go(f"{server.own}/")
        tab.page.locator("tbody tr", has_text=str(child.pid)).wait_for()
        assert (tab.problems, tab.elsewhere) == ([], [])


def test_the_pages_have_the_rights_of_their_user(daemon: Daemon) -> None:
    with browsing(address=daemon.address) as server:
        fields = {"pid": str(os.getpid()), "duration": "1s", "form_secret": "wrong"}
        assert server.ask("/live/trace", "POST", fields).status == 403
        assert server.shown("/c/20260131-120000-nothing").status == 404
        fields["form_secret"] = next(iter(server.web.sessions._sessions.values())).form_secret
        gone = server.ask("/live/trace", "POST", fields | {"pid": "2147483000"})
        assert gone.status == 404
        assert "2147483000" in gone.text


def test_what_the_daemon_lists_is_accessible(daemon: Daemon, new_tab: Any, axe: str) -> None:
    with browsing(address=daemon.address) as server:
        tab = new_tab(bypass_csp=True)
        tab.go(server.web.address)
        tab.page.get_by_role("heading", name="Captures").wait_for()
        captures = re.findall(r'href="(/c/[\w-]+)"', server.ask("/").text)
        for path in ("/", "/live", *captures[:1]):
            server.shown(path)
            tab.go(server.own + path)
            tab.page.evaluate(axe)
            found = tab.page.evaluate("axe.run().then((result) => result.violations)")
            assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], path
