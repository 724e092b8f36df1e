"""The text that libkineto gets, word for word, and what it is never asked for."""

from typing import Any

import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.captures.kineto_target.config_text import (
    LEAST_LEAD_NS,
    TraceDestination,
    kineto_text,
    unsupported,
)

S, MS = 10**9, 10**6
NOW_NS = 1_795_751_500 * S
HERE = TraceDestination(folder="/tmp", stem="kinetod-c1-00", trace_id=42)
START = wire.Start("c1", [], 500 * MS, None, None, 0, 0, 0, 0, 1 << 20, None, {})
ITERATIONS = START._replace(duration_ns=None, iterations=5)
OPTIONS_OFF = (
    "PROFILE_REPORT_INPUT_SHAPES=false\nPROFILE_PROFILE_MEMORY=false\nPROFILE_WITH_STACK=false\n"
    "PROFILE_WITH_FLOPS=false\nPROFILE_WITH_MODULES=false\n"
)


def lines(start: wire.Start = START, **spec: Any) -> dict[str, str]:
    text = kineto_text(start, pb.CaptureSpec(**spec), HERE, now_ns=NOW_NS).text.decode()
    return dict(line.split("=") for line in text.splitlines())  # libkineto takes exactly one "=" as well


def warnings(start: wire.Start, **spec: Any) -> tuple[str, ...]:
    return kineto_text(start, pb.CaptureSpec(**spec), HERE, now_ns=NOW_NS).warnings


def test_a_duration_starts_at_once_and_without_warming_up() -> None:
    asked = kineto_text(START, pb.CaptureSpec(), HERE, now_ns=NOW_NS)
    assert asked.warnings == ()
    assert asked.text.decode() == (
        "ACTIVITIES_LOG_FILE=/tmp/kinetod-c1-00.json\nREQUEST_TRACE_ID=42\nPROFILE_START_TIME=0\n"
        "ACTIVITIES_DURATION_MSECS=500\nACTIVITIES_WARMUP_PERIOD_SECS=0\n" + OPTIONS_OFF
    )


def test_iterations_bring_a_duration_of_0_so_that_a_program_without_steps_refuses_them() -> None:
    asked = kineto_text(ITERATIONS, pb.CaptureSpec(), HERE, now_ns=NOW_NS)
    assert asked.text.decode() == (
        "ACTIVITIES_LOG_FILE=/tmp/kinetod-c1-00.json\nREQUEST_TRACE_ID=42\nPROFILE_START_ITERATION=0\n"
        "ACTIVITIES_ITERATIONS=5\nACTIVITIES_DURATION_MSECS=0\nACTIVITIES_WARMUP_PERIOD_SECS=0\n" + OPTIONS_OFF
    )


def test_a_duration_instead_of_iterations_is_sent_and_told() -> None:
    start = ITERATIONS._replace(or_duration_ns=1500 * MS, iteration_roundup=100, start_iteration=7, warmup_iterations=2)
    found = lines(start)
    assert (found["ACTIVITIES_DURATION_MSECS"], found["PROFILE_START_ITERATION"]) == ("1500", "7")
    assert (found["PROFILE_START_ITERATION_ROUNDUP"], found["ACTIVITIES_WARMUP_ITERATIONS"]) == ("100", "2")
    (warning,) = warnings(start)
    assert warning.startswith("libkineto does not report which of the two it recorded: 5 iterations or")


def test_parts_of_a_second_of_warming_up_are_rounded_up_and_told() -> None:
    start = START._replace(warmup_ns=1200 * MS)
    assert lines(start)["ACTIVITIES_WARMUP_PERIOD_SECS"] == "2"
    assert warnings(start) == ("libkineto's warm-up is in whole seconds: rounded up to 2 s",)


def test_a_start_time_that_libkineto_can_keep_is_sent() -> None:
    start = START._replace(start_time_ns=NOW_NS + LEAST_LEAD_NS)
    assert lines(start)["PROFILE_START_TIME"] == str((NOW_NS + LEAST_LEAD_NS) // MS)
    assert warnings(start) == ()


def test_a_start_time_before_the_next_poll_is_dropped_and_told() -> None:
    start = START._replace(start_time_ns=NOW_NS + LEAST_LEAD_NS - 1)
    assert lines(start)["PROFILE_START_TIME"] == "0"
    assert "cannot meet a start time this soon" in warnings(start)[0]


def test_options_have_kinetos_names() -> None:
    found = lines(START._replace(options={"record_shapes": True, "with_stack": True, "profile_memory": True}))
    switches = {key: value for key, value in found.items() if key.startswith("PROFILE_") and value in ("true", "false")}
    assert switches == {
        "PROFILE_REPORT_INPUT_SHAPES": "true",
        "PROFILE_PROFILE_MEMORY": "true",
        "PROFILE_WITH_STACK": "true",
        "PROFILE_WITH_FLOPS": "false",
        "PROFILE_WITH_MODULES": "false",
    }


def test_stacks_are_exact_calls_which_is_told_unless_they_were_asked_for() -> None:
    start = START._replace(options={"with_stack": True})
    assert "every Python call" in warnings(start, options=pb.Options(with_stack=True))[0]
    assert warnings(start, options=pb.Options(with_stack=True, stack_trace=True)) == ()


def test_activity_types_come_last_as_the_caller_named_them_with_those_that_options_bring() -> None:
    start = START._replace(activity_types=["cpu_op", "python_function"])
    found = lines(start, activity_types=["cpu_op", "external_correlation"])
    assert list(found)[-1] == "ACTIVITY_TYPES"
    assert found["ACTIVITY_TYPES"] == "cpu_op,external_correlation,python_function"


def test_a_buffer_limit_is_sent_only_if_the_caller_set_it() -> None:
    assert "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB" not in lines()
    assert lines(buffer_limit_bytes=256 << 20)["ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB"] == "256"


def test_libkineto_puts_the_pid_before_the_suffix() -> None:
    assert (HERE.path, HERE.name(77)) == ("/tmp/kinetod-c1-00.json", "kinetod-c1-00_77.json")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (pb.CaptureSpec(activity_types=["memory_snapshot"]), "libkineto cannot record memory_snapshot on demand"),
        (pb.CaptureSpec(options=pb.Options(stack_sample_hz=50)), "libkineto does not sample stacks"),
        (pb.CaptureSpec(options=pb.Options(wait_for_user_profiler=True)), "libkineto does not wait"),
    ],
)
def test_what_libkineto_cannot_do_is_refused(spec: pb.CaptureSpec, why: str) -> None:
    assert unsupported(spec).startswith(why)


def test_what_libkineto_can_do_is_not_refused() -> None:
    assert unsupported(pb.CaptureSpec(activity_types=["cpu_op", "kernel", "external_correlation"])) == ""
