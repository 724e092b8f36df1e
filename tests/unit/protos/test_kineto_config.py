"""Kineto's configuration: how it is read and what it asks for."""

from typing import Any

import pytest
from kineto_protos import kineto_config
from kineto_protos.kineto_config import (
    KEYS,
    Effect,
    KinetoConfigError,
    RequestedCapture,
    Type,
    is_inline,
    merged,
    parse,
    parse_inline,
)

NOW_NS = 1_700_000_000_000_000_000
NOW_MS = 1_700_000_000_000
# As Dynolog's `dyno gputrace` sends it.
DYNOLOG = """ACTIVITIES_LOG_FILE=/tmp/x.json
PROFILE_START_TIME=0
ACTIVITIES_DURATION_MSECS=500
PROFILE_REPORT_INPUT_SHAPES=true
PROFILE_PROFILE_MEMORY=false
PROFILE_WITH_STACK=true
PROFILE_WITH_FLOPS=false
PROFILE_WITH_MODULES=false
"""
DYNOLOG_ITERATIONS = """ACTIVITIES_LOG_FILE=/tmp/x.json
PROFILE_START_ITERATION=0
PROFILE_START_ITERATION_ROUNDUP=1000
ACTIVITIES_ITERATIONS=42
"""


def asked(text: str) -> RequestedCapture:
    return kineto_config.request(parse(text), NOW_NS)


def said(result: RequestedCapture) -> dict[str, Any]:
    """The attributes that are set."""
    values = {name: getattr(result, name) for name in RequestedCapture.__slots__ if name not in ("origins", "notes")}
    return {name: value for name, value in values.items() if value not in (None, ())}


def notes(text: str) -> list[str]:
    return list(asked(text).notes)


def test_a_timed_configuration_of_dynolog_is_understood_without_a_word() -> None:
    assert said(asked(DYNOLOG)) == {
        "log_file": "/tmp/x.json",
        "duration": 500_000_000,
        "record_shapes": True,
        "with_stack": True,
    }
    assert notes(DYNOLOG) == []


def test_an_iteration_configuration_of_dynolog_starts_at_the_next_multiple() -> None:
    assert said(asked(DYNOLOG_ITERATIONS)) == {"log_file": "/tmp/x.json", "iterations": 42, "roundup": 1000}
    assert notes(DYNOLOG_ITERATIONS) == []


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("ACTIVITIES_DURATION_SECS=3", "duration", 3_000_000_000),
        ("ACTIVITIES_DURATION_MSECS=250", "duration", 250_000_000),
        ("ACTIVITIES_DURATION_SECS=3\nACTIVITIES_DURATION_MSECS=1", "duration", 1_000_000),
        ("ACTIVITIES_DURATION_MSECS=1\nACTIVITIES_DURATION_SECS=3", "duration", 3_000_000_000),
        ("ACTIVITIES_WARMUP_PERIOD_SECS=2", "warmup", 2_000_000_000),
        (f"PROFILE_START_TIME={NOW_MS + 5000}", "start_at", NOW_NS + 5_000_000_000),
        ("ACTIVITIES_ITERATIONS=5", "iterations", 5),
        ("ACTIVITIES_ITERATIONS=5\nPROFILE_START_ITERATION=7", "start_iteration", 7),
        ("ACTIVITIES_ITERATIONS=5\nPROFILE_START_ITERATION_ROUNDUP=9", "roundup", 9),
        ("ACTIVITIES_ITERATIONS=5\nACTIVITIES_WARMUP_ITERATIONS=2", "warmup_iterations", 2),
        ("ACTIVITIES_ITERATIONS=5\nACTIVITIES_DURATION_SECS=2", "or_duration", 2_000_000_000),
        ("ACTIVITY_TYPES=CPU_OP, kernel,,", "activities", ("cpu_op", "kernel")),
        ("ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=64", "buffer_limit", 64 << 20),
        ("PROFILE_REPORT_INPUT_SHAPES=y", "record_shapes", True),
        ("CLIENT_INTERFACE_ENABLE_OP_INPUTS_COLLECTION=1", "record_shapes", True),
        ("PROFILE_WITH_STACK=T", "with_stack", True),
        ("PYTHON_STACK_TRACE=yes", "with_stack", True),
        ("PROFILE_PROFILE_MEMORY=true", "memory", True),
        ("PROFILE_WITH_FLOPS=YES", "with_flops", True),
        ("PROFILE_WITH_MODULES=1", "with_modules", True),
        ("REQUEST_TRACE_ID=abc", "labels", (("request_trace_id", "abc"),)),
        ("REQUEST_GROUP_TRACE_ID=g", "labels", (("request_group_trace_id", "g"),)),
        ("ACTIVITIES_LOG_FILE = /tmp/a b.json  # here", "log_file", "/tmp/a b.json"),
        ("CUPTI_PM_SAMPLING_METRICS=sm__cycles_active.avg,x.sum", "counters", ("", ("sm__cycles_active.avg", "x.sum"))),
        ("PROFILE_MEMORY=true", "activities", ("memory_snapshot",)),
        ("PROFILE_MEMORY=true", "duration", 1_000_000_000),
        ("PROFILE_MEMORY=true\nPROFILE_MEMORY_DURATION_MSECS=300", "duration", 300_000_000),
    ],
)
def test_each_used_key_becomes_what_it_says(text: str, attribute: str, value: object) -> None:
    assert getattr(asked(text), attribute) == value


def test_every_used_key_is_in_the_tests_above() -> None:
    tested = test_each_used_key_becomes_what_it_says.pytestmark[0].args[1]  # type: ignore[attr-defined]  # a mark
    text = "\n".join(row[0] for row in tested)
    used = {name for name, key in KEYS.items() if key.field and name != "ACTIVITIES_ENABLED"}
    assert {name for name in used if name not in text} == set()


def test_without_a_length_it_is_half_a_second_as_in_kineto() -> None:
    assert said(asked("# nothing\n")) == {"duration": 500_000_000}


@pytest.mark.parametrize("text", ["n", "no", "f", "false", "0", "N", "False"])
def test_a_switch_can_be_off(text: str) -> None:
    assert asked(f"PROFILE_WITH_STACK={text}").with_stack is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ACTIVITIES_DURATION_MSECS=abc", "got 'abc'"),
        ("ACTIVITIES_DURATION_MSECS=-1", "expected a whole number from 0 to 2147483647, got '-1'"),
        ("ACTIVITIES_DURATION_MSECS=2147483648", "got '2147483648'"),
        ("ACTIVITIES_DURATION_MSECS=", "got ''"),
        ("ACTIVITIES_DURATION_MSECS=0x10", "got '0x10'"),
        ("PROFILE_START_TIME=9223372036855", "from 0 to 9223372036854"),
        ("PROFILE_WITH_STACK=maybe", "expected yes or no"),
        ("ENABLE_IPC_FABRIC=2", "expected yes or no"),  # without effect, but wrong in Kineto too
        ("just words", "expected KEY=VALUE, got 'just words'"),
        ("ACTIVITIES_LOG_FILE=/tmp/a=b.json", "expected KEY=VALUE"),
        ("=5", "expected KEY=VALUE"),
        ("ACTIVITY_TYPES=kernel;cpu_op", "expected names like kernel,gpu_memcpy, got 'kernel;cpu_op'"),
        ("ACTIVITY_TYPES=mtia_runtime", "this version records none of these: mtia_runtime"),
        ("ACTIVITIES_ENABLED=false", "tracing is switched off"),
        (f"PROFILE_START_TIME={NOW_MS - 11_000}", "is 11 s in the past; use 0 to start at once"),
    ],
)
def test_a_malformed_value_is_an_error_that_says_where(text: str, message: str) -> None:
    with pytest.raises(KinetoConfigError) as caught:
        kineto_config.request(parse(f"\n# a comment\n{text}\n", "/etc/libkineto.conf"), NOW_NS)
    key = text.partition("=")[0]
    where = f"/etc/libkineto.conf:3: {key}: " if key in KEYS and "expected KEY" not in message else ".conf:3: "
    assert where in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_key_is_only_a_warning() -> None:
    assert notes("FANCY_NEW_KEY=1") == ["line 1: FANCY_NEW_KEY: unknown key, ignored"]


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.effect is Effect.LEGACY])
def test_a_legacy_key_is_accepted_with_a_warning(name: str) -> None:
    assert len(notes(f"{name}=1")) == 1


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.effect is Effect.NONE])
def test_a_key_without_effect_says_why(name: str) -> None:
    assert notes(f"{name}=1") == [f"line 1: {name} has no effect: {KEYS[name].here}"]
    assert KEYS[name].here


def test_keys_that_do_not_fit_together_say_which_one_counts() -> None:
    text = f"ACTIVITIES_ITERATIONS=5\nPROFILE_START_TIME={NOW_MS}\nACTIVITIES_WARMUP_PERIOD_SECS=1"
    assert notes(text) == [
        "line 3: ACTIVITIES_WARMUP_PERIOD_SECS has no effect: ACTIVITIES_ITERATIONS takes precedence",
        "line 2: PROFILE_START_TIME has no effect: ACTIVITIES_ITERATIONS takes precedence",
    ]
    assert notes("PROFILE_START_ITERATION=5") == [
        "line 1: PROFILE_START_ITERATION has no effect: it needs ACTIVITIES_ITERATIONS"
    ]
    assert notes("PROFILE_MEMORY=1\nPROFILE_WITH_STACK=1") == [
        "line 2: PROFILE_WITH_STACK has no effect: PROFILE_MEMORY requests only a snapshot"
    ]


def test_a_start_time_that_has_just_passed_starts_at_once() -> None:
    result = asked(f"PROFILE_START_TIME={NOW_MS - 2500}")
    assert result.start_at is None
    assert result.notes == ("line 1: PROFILE_START_TIME is 2.5 s in the past, so the capture starts at once",)


def test_types_of_other_vendors_are_left_out_with_a_word() -> None:
    result = asked("ACTIVITY_TYPES=kernel,mtia_runtime,hpu_op")
    assert result.activities == ("kernel",)
    assert result.notes == (
        "line 1: ACTIVITY_TYPES: types that this version does not record are ignored: mtia_runtime, hpu_op",
    )


def test_settings_on_a_command_line_are_separated_by_commas_and_may_hold_lists() -> None:
    config = parse_inline("ACTIVITY_TYPES=cpu_op,kernel,ACTIVITIES_DURATION_MSECS=20, PROFILE_WITH_STACK=y")
    result = kineto_config.request(config, NOW_NS)
    assert (result.activities, result.duration, result.with_stack) == (("cpu_op", "kernel"), 20_000_000, True)
    assert parse_inline("ACTIVITIES_ITERATIONS=3\nACTIVITIES_WARMUP_ITERATIONS=1").value("warmup_iterations") == 1


@pytest.mark.parametrize(("text", "inline"), [("A=1", True), ("a\nb", True), ("/etc/libkineto.conf", False)])
def test_settings_and_files_are_told_apart(text: str, inline: bool) -> None:
    assert is_inline(text) is inline


def test_a_later_configuration_counts() -> None:
    both = merged([parse("PROFILE_WITH_STACK=1\nACTIVITIES_DURATION_MSECS=1\nX=1"), parse("PROFILE_WITH_STACK=0\nY=1")])
    result = kineto_config.request(both, NOW_NS)
    assert (result.with_stack, result.duration) == (None, 1_000_000)
    assert len(result.notes) == 2


def test_windows_line_ends_are_no_part_of_a_value() -> None:
    assert asked("PROFILE_WITH_STACK=true\r\nACTIVITIES_LOG_FILE=/tmp/x.json\r\n").log_file == "/tmp/x.json"


def test_the_table_is_consistent() -> None:
    for name, key in KEYS.items():
        assert key.name == name
        assert bool(key.field) == (key.effect is Effect.USED or "old name" in key.meaning)
        assert key.factor == 1 or key.kind in (Type.INT, Type.INT64)
        assert key.meaning
        assert key.here


def test_a_start_time_that_no_clock_in_nanoseconds_has_is_refused() -> None:
    with pytest.raises(KinetoConfigError, match="PROFILE_START_TIME: expected a whole number from 0 to 9223372036854,"):
        parse("PROFILE_START_TIME=9999999999999")
    assert parse("PROFILE_START_TIME=9223372036854").value("start_time_ns") == 9223372036854 * 10**6
