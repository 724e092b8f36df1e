"""What the page of a capture offers."""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace import run_view
from kineto_trace.analysis.overview.not_recorded_views import PARTS
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from kineto_trace.store.parquet_folder import save_columns
from kinetoctl.base.reason_codes import remedy
from kinetoctl.web.analyses.trace_jobs import TraceJobs
from kinetoctl.web.pages.capture_page import NEEDS, OTHERS, QUESTIONS, grouped, needs_of, nothing_because
from support.service import captures
from support.service.fake_profiler import FakeProfiler, serve
from support.trace_files.sampled_stacks import LOADER, MAIN, sampled_trace
from support.trace_files.traces import target, trace
from support.web.browsing import browsing

GREY = re.compile(r'class="nothing"><a href="[^"]*">([^<]*)<')


def test_views_are_in_the_order_of_their_groups_words_whatever_order_they_were_registered_in() -> None:
    names = ["call_tree", "roofline", "operators_of_mine", "new", "operators", "counters_by_kernel", "modules"]
    for order in (names, names[::-1]):
        found = grouped([{"name": name, "description": f"About {name}."} for name in order], {})
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
    asked, searched = page.split("<details>")[-2:]
    assert GREY.findall(asked.rpartition('id="views"')[2]) == ["Kernels", "Idle GPU", "Memory", "Ranks", "Counters"]
    assert "Is the GPU waiting, and for what? Nothing here: no GPU activities: " in page
    assert "Nothing here: only one process was recorded." in page
    assert {"Kernels by operator", "Memory events", "Roofline"} <= set(GREY.findall(searched))
    assert {"Python samples", "Overview", "Findings", "Call tree"}.isdisjoint(GREY.findall(searched))


KERNEL = {"name": "k", "start": 0, "duration": 500_000, "device": 0, "stream": 7, "correlation": 1}
CALL = {"name": "cudaLaunchKernel", "start": 0, "duration": 10, "thread": 1, "correlation": 1}
OPERATOR = {"name": "aten::mm", "start": 0, "duration": 100_000, "thread": 1, "finished": 1}
SAMPLE = {
    "name": "SM active [%]",
    "metric": "sm__active",
    "unit": "%",
    "start": 0,
    "duration": 1_000_000,
    "value": 50.0,
}
TABLES: Mapping[str, Any] = {
    "nothing": {},
    "kernels": {"kernel": [KERNEL, {**KERNEL, "start": 700_000}]},
    "launches": {"kernel": [KERNEL], "cuda_runtime": [CALL]},
    "copies": {"gpu_memcpy": [{**KERNEL, "bytes": 4096}]},
    "calls": {"cuda_runtime": [CALL]},
    "operators": {"cpu_op": [OPERATOR]},
    "collectives of the host": {"cpu_op": [{**OPERATOR, "name": "gloo:all_reduce"}]},
    "Python": {"python_function": [{**OPERATOR, "name": "a.py(1): f"}]},
    "annotations": {"user_annotation": [OPERATOR]},
    "hardware counters": {"counter": [SAMPLE]},
}


def written(folder: Path, *traces: Mapping[str, Any]) -> list[str]:
    """The paths of traces with these tables, as those of one job."""
    for rank, tables in enumerate(traces):
        save_columns(trace(tables, target=target(rank=rank, world_size=len(traces))), folder / f"rank{rank}.kineto")
    return [str(folder / f"rank{rank}.kineto") for rank in range(len(traces))]


def answered(label: str, reasons: Mapping[str, str]) -> bool:
    """Whether the question is offered."""
    (needs,) = (needs for name, _, _, needs in QUESTIONS if name == label)
    return not all(part in reasons for part in needs)


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_a_view_that_is_grey_has_no_rows(tmp_path: Path, tables: Mapping[str, Any]) -> None:
    (first,) = TraceJobs().first_screen(written(tmp_path, tables))
    groups = grouped([{"name": name, "description": "x"} for name in VIEWS], nothing_because(first))
    grey = [view["name"] for _, views in groups for view in views if view["why"]]
    results = {name: run_view(name, Context(trace(tables))) for name in grey}
    assert [name for name, result in results.items() if len(result)] == []
    assert len(grey) > 20


def test_a_job_cannot_answer_what_none_of_its_ranks_recorded(tmp_path: Path) -> None:
    (first,) = TraceJobs().first_screen(written(tmp_path, TABLES["operators"], TABLES["launches"]))
    reasons = nothing_because(first)
    assert [label for label, *_ in QUESTIONS if not answered(label, reasons)] == ["Memory", "Counters"]
    assert reasons["allocations"] == "no allocations: not requested" and reasons["counters"] == "no counters"


def test_an_empty_trace_cannot_answer_anything(tmp_path: Path) -> None:
    (first,) = TraceJobs().first_screen(written(tmp_path, {}))
    reasons = nothing_because(first)
    assert [label for label, *_ in QUESTIONS if answered(label, reasons)] == []
    assert reasons["step time"] == "the trace has no GPU activity" and reasons["events"] == "no events"


def test_the_step_time_of_a_truncated_file_is_not_shown_for_one_reason(tmp_path: Path) -> None:
    notes = ("the file is truncated in its list of events, after 9 of about 12 events",)
    save_columns(replace(trace(TABLES["kernels"]), notes=notes), tmp_path / "cut.kineto")
    (first,) = TraceJobs().first_screen([str(tmp_path / "cut.kineto")])
    why = "whole kinds of activities may be missing in a truncated file, so its shares would be wrong"
    assert nothing_because(first)["step time"] == why


def test_nothing_is_grey_before_the_trace_was_read() -> None:
    assert nothing_because(None) == {}


def test_every_word_of_what_views_need_begins_the_name_of_a_view() -> None:
    words = [(parts, word) for parts, words in NEEDS for word in words]
    assert [
        word for parts, word in words if not any(needs_of(name) == parts and name.startswith(word) for name in VIEWS)
    ] == []
    assert {part for parts, _ in words for part in parts} <= {*(part.name for part in PARTS), "ranks", "step time"}
