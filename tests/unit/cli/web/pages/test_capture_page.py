"""What the page of a capture offers."""

from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.web.pages.capture_page import OTHERS, grouped
from support.service import captures
from support.service.fake_profiler import FakeProfiler, serve
from support.web.browsing import browsing


def test_views_are_in_the_order_of_their_groups_words_whatever_order_they_were_registered_in() -> None:
    names = ["call_tree", "roofline", "operators_of_mine", "new", "operators", "counters_by_kernel", "modules"]
    for order in (names, names[::-1]):
        found = grouped([{"name": name, "description": f"About {name}."} for name in order])
        assert [(group, [view["name"] for view in views]) for group, views in found] == [
            ("GPU", ["counters_by_kernel", "roofline"]),
            ("Host and Python", ["operators", "operators_of_mine", "modules", "call_tree"]),
            (OTHERS, ["new"]),
        ]


def test_a_capture_that_failed_shows_the_reason_and_the_remedy_and_no_views() -> None:
    failed = captures.target(
        state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_FAILED, reason_code="AGENT_SILENT", reason="no answer for 15 s"
    )
    stored = captures.capture(failed, status=pb.CAPTURE_STATUS_FAILED)
    profiler = FakeProfiler(stored=stored, pages=[pb.ListCapturesResponse()])
    with serve(profiler) as server, browsing(address=server.address) as browser:
        page = browser.ask("/c/c0ffee").text
    assert "no answer for 15 s [AGENT_SILENT]" in page and "kinetoctl explain AGENT_SILENT" in page
    assert "This capture has no trace; the verdicts above say why." in page
    assert "/c/c0ffee/view/" not in page and "What to change" not in page
