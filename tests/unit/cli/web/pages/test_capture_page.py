"""What the page of a capture offers."""

import re
import time
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.formats.trace_export import export_trace
from kinetoctl.base.reason_codes import remedy
from kinetoctl.web.pages.capture_page import OTHERS, QUESTIONS, answerable, grouped
from support.service import captures
from support.service.fake_profiler import FakeProfiler, serve
from support.trace_files.sampled_stacks import LOADER, MAIN, sampled_trace
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
    assert "no answer for 15 s [AGENT_SILENT]" in page and "kinetoctl explain" not in page
    assert f"<dt>what to do</dt><dd><div>{remedy('AGENT_SILENT')}</div></dd>" in page
    assert "This capture has no trace; the verdicts above say why." in page
    assert "/c/c0ffee/view/" not in page and "What to change" not in page


def test_a_running_capture_shows_how_far_it_is_and_can_be_stopped() -> None:
    target = captures.target(state=pb.TARGET_STATE_COLLECT)
    target.state_since_ns = time.time_ns() - 2_500_000_000
    stored = captures.capture(target)
    stored.spec.duration_ns = 3600 * 10**9
    profiler = FakeProfiler(stored=stored, pages=[pb.ListCapturesResponse()])
    with serve(profiler) as server, browsing(address=server.address) as browser:
        page = browser.ask("/c/c0ffee").text
        assert " of 1 h" in page and '<details id="origin" open>' in page
        assert browser.ask("/c/c0ffee/stop", "POST", {"form_secret": "wrong"}).status == 403
        answer = browser.ask("/c/c0ffee/stop", "POST", {"form_secret": browser.form_secret("/c/c0ffee")})
    assert (answer.status, answer.headers["Location"]) == (303, "/c/c0ffee")
    (cancelled,) = (request for request in profiler.requests if isinstance(request, pb.CancelCaptureRequest))
    assert (cancelled.id, cancelled.keep_partial) == ("c0ffee", True)


@pytest.mark.parametrize(("verdict", "folded"), [(pb.VERDICT_DONE, True), (pb.VERDICT_PARTIAL, False)])
def test_where_a_trace_comes_from_is_folded_if_nothing_is_missing(verdict: pb.Verdict, folded: bool) -> None:
    ended = captures.target(state=pb.TARGET_STATE_ENDED, verdict=verdict)
    stored = captures.capture(ended, status=pb.CAPTURE_STATUS_DONE)
    profiler = FakeProfiler(stored=stored, pages=[pb.ListCapturesResponse()])
    with serve(profiler) as server, browsing(address=server.address) as browser:
        assert ('<details id="origin">' in browser.ask("/c/c0ffee").text) == folded


def test_the_capture_before_of_the_same_process_is_one_click_away() -> None:
    def stored(name: str, pid: int, age: int) -> pb.Capture:
        made = captures.capture(captures.done_target(pid), status=pb.CAPTURE_STATUS_DONE)
        made.id, made.created_ns = name, captures.START_NS - age
        return made

    kept = [stored("later", 4242, 0), stored("c0ffee", 4242, 1), stored("other", 77, 2), stored("before", 4242, 3)]
    profiler = FakeProfiler(stored=kept[1], pages=[pb.ListCapturesResponse(captures=kept)])
    with serve(profiler) as server, browsing(address=server.address) as browser:
        page = browser.ask("/c/c0ffee").text
        compared = browser.ask("/c/c0ffee?base=before").text
    assert 'href="/c/c0ffee?base=before">Compare with the previous capture' in page
    assert re.findall(r'<option value="(\w+)"', page) == ["before", "later", "other"]
    assert "Compare with the previous capture" not in compared


def test_what_a_trace_cannot_answer_says_why(tmp_path: Path) -> None:
    export_trace(sampled_trace([(*MAIN, LOADER)] * 4), tmp_path / "trace.json.gz")
    with browsing([tmp_path / "trace.json.gz"]) as browser:
        (trace_id,) = re.findall(r'href="/c/(\w+)"', browser.ask("/").text)
        page = browser.shown(f"/c/{trace_id}").text
    assert sorted(label for label in re.findall(r'class="nothing"><a href="[^"]*">([^<]*)<', page)) == [
        "Idle GPU", "Kernels", "Memory", "Ranks",
    ]  # fmt: skip
    assert "Is the GPU waiting, and for what? Nothing here: no GPU activities: " in page
    assert "Nothing here: only one process was recorded." in page


def test_all_questions_of_a_job_are_offered() -> None:
    assert [why for *_, why in answerable({"several": True, "missing": {"rows": []}})] == [""] * len(QUESTIONS)
    assert [why for *_, why in answerable(None)] == [""] * len(QUESTIONS)
