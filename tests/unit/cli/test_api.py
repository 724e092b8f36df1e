"""What is shown of captures and their results when their names are typed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl import api
from kinetoctl.client.fleet.fleet_run import FleetRequest
from kinetoctl.client.fleet.host_run import Fleet, HostRun
from kinetoctl.errors import NotFound, Refused, UsageProblem
from support.service.fake_profiler import Abort, FakeProfiler, FakeServer, serve
from support.service.stacks import at_lock, frame, hanging, read, thread

EVIL = "<script>alert(1)</script>\u202e"


def test_completion_offers_the_documented_names_and_no_imports() -> None:
    assert dir(api) == [
        "ANY_RANK",
        "AsyncCapture",
        "Capture",
        "CaptureOptions",
        "CaptureResult",
        "Files",
        "HostOptions",
        "Place",
        "ProcessResult",
        "Selection",
        "StackResult",
        "async_capture",
        "capture",
        "stacks",
    ]


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
    assert repr(api.Capture(request, fleet)) == "<Capture c1 on 1 host: running on 1>"


EVERYBODY = api.Selection(ranks=(api.ANY_RANK,))
NO_MATCH = Abort(grpc.StatusCode.NOT_FOUND, "no process matches rank all", "NO_MATCH")
BUSY = Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", "TOO_MANY_CALLS")
VERDICT = "Rank 1 is not in the all_reduce in which 7 ranks wait: it waits for a lock in load_next_batch (train.py:6)."


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with serve(FakeProfiler()) as one, serve(FakeProfiler()) as other:
        yield [one, other]


def of_hosts(servers: list[FakeServer]) -> api.HostOptions:
    return api.HostOptions(at=[api.Place(f"n{number}", each.address) for number, each in enumerate(servers, 1)])


def test_stacks_are_the_verdict_the_groups_and_the_processes_with_their_frames(servers: list[FakeServer]) -> None:
    servers[0].profiler.stacks, servers[1].profiler.stacks = [hanging()[:4]], [hanging()[4:]]
    found = api.stacks(EVERYBODY, of_hosts(servers))
    assert servers[0].profiler.requests == [pb.ReadStacksRequest(selector=pb.Selector(ranks=[-1]))]
    assert (found.verdict, found.complete, found.failed_hosts) == (VERDICT, True, {})
    assert [len(group["processes"]) for group in found.groups] == [1, 7]
    late = next(each for each in found.processes if each["process"]["rank"] == 1)
    assert (late["host"], late["threads"][0]["frames"][0]["code"]) == ("n1", "lock.acquire()")
    assert found.text.splitlines()[:3] == [VERDICT, "", "rank 1  pid 4243 on n1  main thread  waits for a lock"]


def test_a_host_or_process_that_could_not_be_read_is_part_of_the_stacks(servers: list[FakeServer]) -> None:
    servers[0].profiler.stacks, servers[1].profiler.stacks = [[read(at_lock(), 0)]], [[BUSY]]
    found = api.stacks(EVERYBODY, of_hosts(servers))
    assert (found.complete, found.failed_hosts) == (False, {"n2": "too many calls"})
    servers[1].profiler.stacks = [[read(None, 1, reason="it has ended")]]
    assert not api.stacks(EVERYBODY, of_hosts(servers)).complete


def test_stacks_of_nothing_are_an_error_that_says_why(servers: list[FakeServer]) -> None:
    alone = api.HostOptions(address=servers[0].address)
    servers[0].profiler.stacks, servers[1].profiler.stacks = [[NO_MATCH]], [[BUSY]]
    with pytest.raises(NotFound, match="no process matches rank all"):
        api.stacks(EVERYBODY, alone)
    with pytest.raises(NotFound, match="no process matches; n2: too many calls"):
        api.stacks(EVERYBODY, of_hosts(servers))
    servers[0].profiler.stacks = [[]]
    with pytest.raises(NotFound, match="no process matches"):
        api.stacks(EVERYBODY, alone)
    servers[0].profiler.stacks = [[BUSY]]
    with pytest.raises(Refused, match="too many calls"):
        api.stacks(EVERYBODY, of_hosts(servers))
    with pytest.raises(UsageProblem, match="at least one condition"):
        api.stacks(api.Selection(), alone)


def test_stacks_come_in_a_running_event_loop_as_well(servers: list[FakeServer]) -> None:
    servers[0].profiler.stacks = [hanging()]

    async def inside() -> api.StackResult:
        return api.stacks(EVERYBODY, api.HostOptions(address=servers[0].address))

    assert asyncio.run(inside()).verdict == VERDICT


def test_stacks_are_short_in_a_prompt_and_have_no_markup_in_a_notebook(servers: list[FakeServer]) -> None:
    others = [thread("runs", pb.WAIT_NONE, frame(EVIL, line), number=line, name=EVIL) for line in range(1, 400)]
    servers[0].profiler.stacks = [[read(thread("sleeps", pb.WAIT_SLEEP, frame(EVIL, 1)), 0, *others)]]
    found = api.stacks(EVERYBODY, api.HostOptions(address=servers[0].address))
    assert (
        repr(found)
        == r"<StackResult of 1 process: Process 4242 sleeps in <script>alert(1)</script>\u202e (train.py:1).>"
    )
    html = found._repr_html_()
    assert "<script" not in html and "\u202e" not in html + found.text + repr(found)
    assert html.count("\n") < 210 and "more lines" in html
