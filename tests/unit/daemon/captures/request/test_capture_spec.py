from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.conversion.target_conversion import FORMATS as WRITTEN_FORMATS
from kineto_trace.store.output_formats import FILE_NAMES
from kinetod.base.errors import InvalidRequest
from kinetod.captures.request.capture_spec import FORMATS, CaptureRequest, checked_key, checked_spec, request_hash
from kinetod.config.settings import Config

SECOND_NS = 10**9
NOW_NS = 1_800_000_000 * SECOND_NS
CONFIG = Config(listen=(), agent_socket=Path("/a"), state_dir=Path("/s"))


def checked(**fields: Any) -> CaptureRequest:
    if "iterations" not in fields:
        fields.setdefault("duration_ns", SECOND_NS)
    return checked_spec(pb.CaptureSpec(**fields), CONFIG, NOW_NS)


def wrong_field(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checked(**fields)
    return caught.value.metadata["field"]


def test_a_plain_request_gets_the_defaults() -> None:
    request = checked()
    assert request.formats == ("chrome",)
    assert request.recording.buffer_limit_bytes == 128 << 20
    assert request.recording.options == {}
    assert request.recording.iterations is None


def test_a_stack_is_a_python_function() -> None:
    options = pb.Options(with_stack=True)
    assert checked(activity_types=["kernel"], options=options).recording.activity_types == ["kernel", "python_function"]
    assert checked(options=options).recording.activity_types == []


def test_an_exact_stack_is_a_stack() -> None:
    request = checked(activity_types=["cpu_op"], options=pb.Options(stack_trace=True))
    assert request.recording.activity_types == ["cpu_op", "python_function"]
    assert request.recording.options == {"stack_trace": True, "with_stack": True}


@pytest.mark.parametrize("fields", [{"activity_types": ["execution_trace"]}, {"options": {"execution_trace": True}}])
def test_an_execution_trace_is_refused_since_it_can_crash_the_program(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="torch's ExecutionTraceObserver, which can crash"):
        checked(**fields)


def test_allocations_are_beside_the_named_types() -> None:
    options = pb.Options(profile_memory=True)
    assert checked(activity_types=["cpu_op"], options=options).recording.activity_types == [
        "cpu_op",
        "cpu_instant_event",
    ]


def test_a_stack_in_a_snapshot_is_that_of_its_allocations() -> None:
    request = checked(activity_types=["memory_snapshot"], options=pb.Options(with_stack=True))
    assert request.recording.activity_types == ["memory_snapshot"]
    assert request.recording.options == {"with_stack": True}


def test_types_that_are_made_from_others_are_replaced_by_them() -> None:
    names = ["kernel", "gpu_user_annotation", "external_correlation", "user_annotation"]
    assert checked(activity_types=names).recording.activity_types == ["kernel", "user_annotation"]


def test_options_of_operators_need_operators() -> None:
    options = pb.Options(record_shapes=True, with_flops=True)
    assert checked(options=options).recording.options == {"record_shapes": True, "with_flops": True}
    assert checked(activity_types=["cpu_op"], options=options).recording.activity_types == ["cpu_op"]


@pytest.mark.parametrize("duration_ns", [0, -1, 7 * 86_400 * SECOND_NS, 600 * SECOND_NS + 1])
def test_a_duration_out_of_range_is_refused(duration_ns: int) -> None:
    assert wrong_field(duration_ns=duration_ns) == "spec.duration_ns"


def test_a_week_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"spec\.duration_ns: 7 days is longer than the 10 min"):
        checked(duration_ns=7 * 86_400 * SECOND_NS)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"iterations": pb.IterationWindow()}, "spec.iterations.count"),
        ({"iterations": pb.IterationWindow(count=1, start=-1)}, "spec.iterations.start"),
        ({"iterations": pb.IterationWindow(count=1, roundup=-1)}, "spec.iterations.roundup"),
        ({"iterations": pb.IterationWindow(count=1, warmup=-1)}, "spec.iterations.warmup"),
        ({"iterations": pb.IterationWindow(count=1), "warmup_ns": 1}, "spec.warmup_ns"),
        ({"iterations": pb.IterationWindow(count=1), "start_time_ns": NOW_NS}, "spec.start_time_ns"),
        ({"warmup_ns": -1}, "spec.warmup_ns"),
        ({"start_time_ns": NOW_NS - 60 * SECOND_NS}, "spec.start_time_ns"),
        ({"start_time_ns": NOW_NS + 3600 * SECOND_NS}, "spec.start_time_ns"),
        ({"buffer_limit_bytes": 1}, "spec.buffer_limit_bytes"),
        ({"buffer_limit_bytes": 1 << 40}, "spec.buffer_limit_bytes"),
        ({"formats": ["chrome", "xml"]}, "spec.formats[1]"),
        ({"activity_types": ["kernel", "Not A Name"]}, "spec.activity_types[1]"),
        ({"options": pb.Options(stack_sample_hz=1001)}, "spec.options.stack_sample_hz"),
        ({"options": pb.Options(stack_trace=True, stack_sample_hz=50)}, "spec.options.stack_sample_hz"),
        ({"options": pb.Options(record_shapes=True), "activity_types": ["kernel"]}, "spec.options.record_shapes"),
        ({"options": pb.Options(with_modules=True), "activity_types": ["kernel"]}, "spec.options.with_modules"),
        ({"options": pb.Options(with_flops=True), "activity_types": ["kernel"]}, "spec.options.with_flops"),
        (
            {"options": pb.Options(wait_for_user_profiler=True), "start_time_ns": NOW_NS},
            "spec.start_time_ns",
        ),
        ({"arm_ns": -1}, "spec.arm_ns"),
        ({"arm_ns": 3600 * SECOND_NS}, "spec.arm_ns"),
        ({"arm_ns": SECOND_NS, "start_time_ns": NOW_NS}, "spec.start_time_ns"),
        ({"activity_types": ["external_correlation"]}, "spec.activity_types"),
        ({"or_duration_ns": 5}, "spec.or_duration_ns"),
        ({"labels": {"": "x"}}, "spec.labels"),
        ({"labels": {"a b": "x"}}, "spec.labels"),
        ({"labels": {"a": "x" * 256}}, "spec.labels['a']"),
        ({"labels": {str(number): "" for number in range(65)}}, "spec.labels"),
        ({"selector": pb.Selector(pids=[0])}, "spec.selector.pids[0]"),
        ({"selector": pb.Selector(ranks=[0, -2])}, "spec.selector.ranks[1]"),
        ({"selector": pb.Selector(command_regex="(")}, "spec.selector.command_regex"),
        ({"selector": pb.Selector(command_regex="x" * 513)}, "spec.selector.command_regex"),
    ],
)
def test_the_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    assert wrong_field(**fields) == field


def test_something_must_be_recorded() -> None:
    with pytest.raises(InvalidRequest, match="either duration_ns or iterations"):
        checked_spec(pb.CaptureSpec(), CONFIG, NOW_NS)


def test_equal_requests_have_equal_hashes() -> None:
    one = pb.CaptureSpec(duration_ns=1, labels={"a": "1", "b": "2"})
    other = pb.CaptureSpec(duration_ns=1, labels={"b": "2", "a": "1"})
    assert request_hash(one) == request_hash(other)
    assert request_hash(one) != request_hash(pb.CaptureSpec(duration_ns=2))


def test_a_key_has_a_limit() -> None:
    assert checked_key("k" * 128) == "k" * 128
    with pytest.raises(InvalidRequest, match="idempotency_key: must be at most 128 characters long"):
        checked_key("k" * 129)


def test_the_formats_are_those_of_the_trace_library() -> None:
    assert set(WRITTEN_FORMATS) == set(FORMATS)
    assert {name: entry.file_name for name, entry in WRITTEN_FORMATS.items()} == FILE_NAMES


EVIL = ("\x1b[2J", "a\nb", "a\tb", "\x9b31m", "\x7f", "\u202e", "\u2028")


@pytest.mark.parametrize("text", EVIL)
def test_what_a_user_names_has_no_controls(text: str) -> None:
    assert wrong_field(labels={"team": text}) == "spec.labels['team']"
    assert wrong_field(selector=pb.Selector(user=text)) == "spec.selector.user"
    assert wrong_field(selector=pb.Selector(job_ids=["1", text])) == "spec.selector.job_ids[1]"
    assert wrong_field(selector=pb.Selector(command_regex=text)) == "spec.selector.command_regex"
    with pytest.raises(InvalidRequest) as caught:
        checked_key(text)
    assert str(caught.value).isprintable()
    checked(labels={"team": "Vision é 名 =+-@"})


def test_counters_have_defaults_of_their_own_and_are_left_out_unless_they_are_asked_for() -> None:
    assert checked().counters is None
    usual = checked(counters=pb.CounterRequest()).counters
    assert usual is not None and (usual.wanted.set_name, usual.wanted.metrics, usual.interval_ns) == (
        "overview",
        (),
        0,  # the default of each GPU
    )
    named = checked(counters=pb.CounterRequest(metrics=["a.avg", "b.sum"], interval_ns=100_000)).counters
    assert named is not None and (named.wanted.set_name, named.wanted.metrics) == ("", ("a.avg", "b.sum"))


@pytest.mark.parametrize(
    ("counters", "field"),
    [
        (pb.CounterRequest(set="none"), "set"),
        (pb.CounterRequest(set="overview", metrics=["a.avg"]), "set"),
        (pb.CounterRequest(metrics=["a.avg", "a.avg"]), "metrics"),
        (pb.CounterRequest(metrics=["a" * 129]), "metrics"),
        (pb.CounterRequest(metrics=[f"{number}.avg" for number in range(65)]), "metrics"),
        (pb.CounterRequest(interval_ns=9_999), "interval_ns"),
        (pb.CounterRequest(interval_ns=-1), "interval_ns"),
        (pb.CounterRequest(interval_ns=1_000_000_001), "interval_ns"),
    ],
)
def test_wrong_counters_name_their_field(counters: pb.CounterRequest, field: str) -> None:
    assert wrong_field(counters=counters) == f"spec.counters.{field}"


def test_more_samples_than_a_trace_can_have_are_refused_with_the_interval_that_fits() -> None:
    with pytest.raises(InvalidRequest, match="use 1 ms or longer"):
        checked(duration_ns=600 * SECOND_NS, warmup_ns=400 * SECOND_NS, counters=pb.CounterRequest(interval_ns=500_000))
    assert checked(duration_ns=10 * SECOND_NS, counters=pb.CounterRequest(interval_ns=10_000)).counters is not None
