"""Captures by iteration of real agents in real processes, by a real daemon."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.losses import without_losses
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.targets.programs import Program, connected, ready_pids
from support.waiting import scaled

SECOND_NS = 10**9
# Steps until its standard input ends: arguments are the steps before it says "ready", the steps after that (-1: as many
# as there is time for) and the milliseconds that each takes.
TRAINING = """
import select, sys, kineto_agent
kineto_agent.start()
before, after, period_ms = (int(argument) for argument in sys.argv[1:])
for _ in range(before):
    kineto_agent.step()
print("ready", flush=True)
while not select.select([sys.stdin], [], [], period_ms / 1000)[0]:
    if after:
        after -= 1
        kineto_agent.step()
"""


@contextmanager
def training(daemon: Daemon, before: int, after: int, period_ms: int) -> Iterator[Program]:
    """A process with the agent, connected."""
    with connected(daemon, TRAINING, str(before), str(after), str(period_ms)) as process:
        yield process


def iterations_of(stub: ProfilerStub, pid: int) -> int:
    (process,) = stub.ListProcesses(
        pb.ListProcessesRequest(selector=pb.Selector(pids=[pid])), timeout=scaled(10)
    ).processes
    number: int = process.iterations
    return number


def captured(stub: ProfilerStub, processes: Sequence[Program], window: pb.IterationWindow, **more: Any) -> pb.Capture:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[each.pid for each in processes]), iterations=window, **more)
    return watch_to_end(stub, stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(20)).id)


def steps_of(stub: ProfilerStub, capture: pb.Capture, target: pb.Target) -> list[dict[str, Any]]:
    """The iterations in the trace."""
    request = pb.FetchTraceRequest(capture_id=capture.id, pid=target.pid)
    chunks = stub.FetchTrace(request, timeout=10)
    events = json.loads(gzip.decompress(b"".join(chunk.data for chunk in chunks)))["traceEvents"]
    return [event for event in events if str(event.get("name")).startswith("ProfilerStep#")]


def verdicts(capture: pb.Capture) -> list[tuple[str, str]]:
    return [(pb.Verdict.Name(target.verdict), target.reason_code) for target in capture.targets]


@pytest.mark.slow
def test_processes_of_different_pace_record_the_same_iterations(daemon: Daemon) -> None:
    stub = daemon.stub()
    with ExitStack() as stack:
        # So slow that there are seconds for a request to be taken up before the iteration that all can still make.
        paces = [(2, 500), (6, 600), (3, 700)]
        processes = [stack.enter_context(training(daemon, before, -1, period)) for before, period in paces]
        capture = captured(stub, processes, pb.IterationWindow(count=5, roundup=4))
        assert verdicts(capture) == [("VERDICT_DONE", "")] * 3
        assert [without_losses(target.warnings) for target in capture.targets] == [[]] * 3
        firsts = {target.summary.first_iteration for target in capture.targets}
        assert len(firsts) == 1
        first = firsts.pop()
        assert first % 4 == 0 and first > 6
        for target in capture.targets:
            assert target.summary.iterations == 5
            steps = steps_of(stub, capture, target)
            assert [step["name"] for step in steps] == [f"ProfilerStep#{first + number}" for number in range(5)]
            assert {(step["cat"], step["tid"]) for step in steps} == {("user_annotation", target.pid)}


@pytest.mark.slow
def test_another_program_records_its_own_iterations(daemon: Daemon) -> None:
    stub = daemon.stub()
    with training(daemon, 10**6, -1, 20) as far, training(daemon, 1, -1, 20) as near:
        capture = captured(stub, [far, near], pb.IterationWindow(count=3))
        assert verdicts(capture) == [("VERDICT_DONE", "")] * 2
        by_pid = {target.pid: target for target in capture.targets}
        assert by_pid[far.pid].summary.first_iteration > 10**6 > by_pid[near.pid].summary.first_iteration
        assert all("other processes" in without_losses(target.warnings)[0] for target in capture.targets)


@pytest.mark.slow
def test_a_start_that_only_one_process_reaches_is_not_waited_for_for_ever() -> None:
    with (
        running_daemon("--max-duration", "12s") as daemon,  # one of them needs 3 on a quiet machine
        training(daemon, 100, -1, 20) as far,
        training(daemon, 1, -1, 1000) as near,
    ):
        stub = daemon.stub()
        start = iterations_of(stub, far.pid) + 150
        capture = captured(stub, [far, near], pb.IterationWindow(count=3, start=start))
        by_pid = {target.pid: target for target in capture.targets}
        assert by_pid[far.pid].verdict == pb.VERDICT_DONE
        late = by_pid[near.pid]
        assert (late.verdict, late.reason_code) == (pb.VERDICT_FAILED, "ITERATIONS_NOT_REACHED")
        assert f"did not complete 3 iterations from iteration {start} on within the 12 s" in late.reason


def test_a_capture_that_is_cancelled_while_it_is_aligned_never_starts(daemon: Daemon) -> None:
    stub = daemon.stub()
    with training(daemon, 10, -1, 20) as first, training(daemon, 10, -1, 20) as second:
        selector = pb.Selector(pids=[first.pid, second.pid])
        spec = pb.CaptureSpec(selector=selector, iterations=pb.IterationWindow(count=10_000))
        capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(20)).id
        capture = stub.CancelCapture(pb.CancelCaptureRequest(id=capture_id), timeout=scaled(20))
        assert verdicts(capture) == [("VERDICT_CANCELLED", "CANCELLED")] * 2
        assert ready_pids(stub) >= {first.pid, second.pid}


def test_a_process_that_never_stepped_is_refused_or_recorded_for_the_duration(daemon: Daemon) -> None:
    stub = daemon.stub()
    with training(daemon, 0, 0, 20) as process:
        (refused,) = captured(stub, [process], pb.IterationWindow(count=3)).targets
        assert (refused.verdict, refused.reason_code) == (pb.VERDICT_FAILED, "NEVER_STEPPED")
        assert "--or-duration" in refused.reason
        window = pb.IterationWindow(count=3, warmup=5)
        (target,) = captured(stub, [process], window, or_duration_ns=SECOND_NS // 2).targets
        assert target.verdict == pb.VERDICT_DONE
        assert target.summary.window_end_ns - target.summary.window_start_ns == SECOND_NS // 2
        text = "this process has not finished an iteration: recorded for 0.5 s instead, without the warm-up iterations"
        assert without_losses(target.warnings) == [text]


def test_a_loop_that_has_ended_is_recorded_for_the_duration(daemon: Daemon) -> None:
    with training(daemon, 50, 0, 20) as process:
        capture = captured(daemon.stub(), [process], pb.IterationWindow(count=3), or_duration_ns=SECOND_NS // 2)
        (target,) = capture.targets
        assert target.verdict == pb.VERDICT_DONE
        assert without_losses(target.warnings)[0] == "no iteration began for 0.5 s: recorded for 0.5 s instead"


def test_one_that_never_stepped_does_not_keep_the_others_from_their_iterations(daemon: Daemon) -> None:
    stub = daemon.stub()
    with (
        training(daemon, 1, -1, 500) as first,
        training(daemon, 4, -1, 500) as second,
        training(daemon, 0, 0, 20) as idle,
    ):
        window = pb.IterationWindow(count=3)
        capture = captured(stub, [first, second, idle], window, or_duration_ns=5 * SECOND_NS)
        by_pid = {target.pid: target for target in capture.targets}
        assert by_pid[first.pid].summary.first_iteration == by_pid[second.pid].summary.first_iteration > 4
        assert by_pid[idle.pid].verdict == pb.VERDICT_DONE
        assert by_pid[idle.pid].summary.iterations == 0


def test_a_trace_has_as_many_iterations_as_were_asked_for(daemon: Daemon) -> None:
    stub = daemon.stub()
    with training(daemon, 5, -1, 1) as process:
        capture = captured(stub, [process], pb.IterationWindow(count=1500))
        assert verdicts(capture) == [("VERDICT_DONE", "")]
        (target,) = capture.targets
        assert target.summary.iterations == 1500
        steps = sorted(steps_of(stub, capture, target), key=lambda step: float(step["ts"]))
        first = target.summary.first_iteration
        assert [step["name"] for step in steps] == [f"ProfilerStep#{first + number}" for number in range(1500)]
        assert not any("complete" in step["args"] for step in steps)


@pytest.mark.slow
def test_iterations_that_a_window_by_time_cuts_are_marked_and_not_counted(daemon: Daemon) -> None:
    stub = daemon.stub()
    with training(daemon, 5, -1, 50) as process:
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[process.pid]), duration_ns=SECOND_NS)
        capture = watch_to_end(stub, stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(20)).id)
        assert verdicts(capture) == [("VERDICT_DONE", "")]
        (target,) = capture.targets
        steps = sorted(steps_of(stub, capture, target), key=lambda step: float(step["ts"]))
        assert [step["args"].get("complete") for step in steps] == [False, *[None] * (len(steps) - 2), False]
        assert target.summary.iterations == len(steps) - 2 > 0
