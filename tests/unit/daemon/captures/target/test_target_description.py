from typing import Any

import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TargetInfo
from kinetod.captures.target.target_description import (
    checked_iterations,
    checked_settings,
    describe_process,
    describe_target,
)
from support.agent.agent_daemon import start_request
from support.agent.scripted_agent import hello_message


def described(**result: Any) -> TargetInfo:
    ended = wire.Result("c", "done", "", "", 5, 9, {}, {}, {}, {}, [])
    return describe_target(
        capture_id="c",
        host="h",
        process=pb.Process(pid=7, command=["/usr/bin/python", "train.py"], rank=3, job_id="17"),
        hello=hello_message(pid=7),
        start=start_request(options={"with_stack": True}),
        result=ended._replace(**result),
        window_ns=(5, 9),
        labels={"team": "vision"},
    )


def test_a_target_is_described_with_what_its_agent_said_at_the_end() -> None:
    info = described(threads={"7": "main\n", "x": "no"}, iterations={"thread": 7, "starts": [[3, 5], [4, 9]]})
    assert TargetInfo.from_json(info.to_json()) == info
    assert (info.process_name, info.rank, info.window_start_ns, info.window_end_ns) == ("python", 3, 5, 9)
    assert (info.command, info.job_id) == (["/usr/bin/python", "train.py"], "17")
    assert info.threads == {7: "main "}
    assert (info.iterations, info.iteration_thread) == ([[3, 5], [4, 9]], 7)
    assert (info.options, info.labels, info.complete) == ({"with_stack": True}, {"team": "vision"}, True)


def test_a_process_is_described_alike_whoever_records_it() -> None:
    """Its own libkineto or an agent: the trace context and the pod are part of both."""
    process = pb.Process(
        pid=7, trace_parent=f"00-{'1' * 32}-{'2' * 16}-01", pod_name="p", resource={"service.name": "s"}
    )
    info = describe_process(process, capture_id="c", host="h", labels={"a": "b"}, start=start_request())
    assert (info.pid, info.trace_parent, info.labels) == (7, process.trace_parent, {"a": "b"})
    assert info.resource == {"service.name": "s", "k8s.pod.name": "p"}


def test_a_target_has_the_clock_that_was_measured_of_its_host() -> None:
    info = describe_target(
        capture_id="c",
        host="h",
        process=pb.Process(pid=7),
        hello=hello_message(pid=7),
        start=start_request(),
        result=None,
        window_ns=(0, 0),
        labels={},
        clock=pb.ClockOffset(offset_ns=-5, uncertainty_ns=2),
    )
    assert (info.clock_offset_ns, info.clock_uncertainty_ns) == (-5, 2)
    assert (described().clock_offset_ns, described().clock_uncertainty_ns) == (None, None)


def test_a_target_says_what_was_requested_and_why_some_of_it_could_not_be_recorded() -> None:
    info = described(not_recorded={"kernel\n": "busy\n"})
    assert (info.activity_types, info.not_recorded) == (["python_function"], {"kernel ": "busy "})
    assert len(described(not_recorded={str(number): "" for number in range(1000)}).not_recorded) == 64


@pytest.mark.parametrize(
    ("told", "kept"), [(1.25, 1.25), (2, 2.0), (0, 0.0), (-1, 0.0), (1e9, 0.0), (float("nan"), 0.0), ("1.5", 0.0)]
)
def test_a_target_has_the_ratios_of_its_steps_if_they_are_some(told: Any, kept: float) -> None:
    assert described(overhead={"step_ratio": told}).step_ratio == kept
    assert described(overhead={"least_step_ratio": told}).least_step_ratio == kept


def test_settings_that_are_no_plain_values_are_left_out() -> None:
    given = {
        "torch.num_threads": 2,
        "a\n": "b\n",
        "c": [1],
        "d": None,
        "e": float("nan"),
        "f": 2**60,
        "g": True,
        "h": 1.5,
    }
    assert checked_settings(given) == {"torch.num_threads": 2, "a ": "b ", "g": True, "h": 1.5}
    assert len(checked_settings({str(number): 1 for number in range(1000)})) == 128


@pytest.mark.parametrize("thread", [None, "7", -1, 0, 2**31, True, 1.5, [7]])
def test_a_thread_that_is_none_is_not_taken(thread: Any) -> None:
    assert described(iterations={"thread": thread, "starts": [[3, 5]]}).iteration_thread == 0


@pytest.mark.parametrize("starts", [
    None, 5, "x", {"0": 1}, [[]], [[1]], [["1", 2]], [[1, 2, 3]], [[True, 5]], [[-1, 5]],
    [[1, 0]], [[2**53, 5]], [[1, 2**63]], [5]])  # fmt: skip
def test_what_is_no_iteration_is_left_out(starts: Any) -> None:
    assert checked_iterations({"starts": starts}) == []


def test_numbers_and_times_go_upwards_and_are_bounded() -> None:
    assert checked_iterations({"starts": [[3, 50], [3, 60], [4, 40], [5, 70]]}) == [[3, 50], [5, 70]]
    assert len(checked_iterations({"starts": [[number, number + 1] for number in range(5000)]})) == 1024
