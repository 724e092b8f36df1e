"""What is shown of captures and their results when their names are typed."""

from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl import api
from kinetoctl.client.fleet.fleet_run import FleetRequest
from kinetoctl.client.fleet.host_run import Fleet, HostRun

EVIL = "<script>alert(1)</script>\u202e"


def process(rank: int, verdict: str, reason: str = "", host: str = "n1") -> api.ProcessResult:
    code = "GPU_BUSY" if reason else ""
    return api.ProcessResult(
        host=host,
        pid=100 + rank,
        rank=rank,
        verdict=verdict,
        reason_code=code,
        reason=reason,
        paths={"chrome": Path("x")},
    )


def result(*processes: api.ProcessResult, failed: dict[str, str] | None = None, warnings: int = 0) -> api.CaptureResult:
    return api.CaptureResult(
        id="20260131-235959-9f86d0",
        processes=processes,
        failed_hosts=failed or {},
        missing_ranks=(),
        start_ns=0,
        clocks={},
        warnings=tuple(f"warning {number}" for number in range(warnings)),
    )


def test_a_result_says_first_which_processes_were_not_recorded() -> None:
    ranks = [process(rank, "DONE") for rank in range(256)]
    shown = result(*ranks, process(256, "FAILED", "another profiler"), failed={"n9": "no answer"}, warnings=20)
    assert repr(shown).splitlines() == [
        "<CaptureResult 20260131-235959-9f86d0: 256 DONE, 1 FAILED>",
        "  failed: n9: no answer",
        *[f"  warning: warning {number}" for number in range(4)],
        "  and 16 more remarks",
        "  <rank 256, pid 356 on n1: FAILED (GPU_BUSY another profiler)>",
    ]
    html = shown._repr_html_()
    assert html.count("<tr") == 21 and "and 237 more processes" in html
    assert html.index("FAILED") < html.index(">DONE<")


def test_a_result_that_is_whole_is_one_line() -> None:
    assert repr(result(process(0, "DONE"))) == "<CaptureResult 20260131-235959-9f86d0: 1 DONE>"
    assert repr(result()) == "<CaptureResult 20260131-235959-9f86d0: no process>"


def test_no_text_of_a_process_or_host_is_markup() -> None:
    shown = result(process(0, "FAILED", EVIL * 1000, host=EVIL), failed={EVIL: EVIL})
    for text in (repr(shown), shown._repr_html_()):
        assert "\u202e" not in text and len(text) < 5000
    assert "<script" not in shown._repr_html_()


def test_a_capture_says_whether_it_is_known_to_have_ended() -> None:
    members = [HostRun(api.Place("n1", "unix:/x"))]
    fleet = Fleet(id="c1", members=members)
    request = FleetRequest(id="c1", places=[members[0].place], spec=pb.CaptureSpec())
    assert repr(api.Capture(request, fleet)) == "<Capture c1 on 1 host: ended>"
    members[0].capture = pb.Capture(targets=[pb.Target()])
    assert repr(api.Capture(request, fleet)) == "<Capture c1 on 1 host: not known to have ended on 1>"
