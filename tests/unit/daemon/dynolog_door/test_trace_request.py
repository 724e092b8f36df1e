"""Configuration texts of Dynolog's clients become captures."""

from pathlib import Path

import pytest
from kineto_protos.kineto_config import KinetoConfigError
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.dynolog_door.json_frames import read_object
from kinetod.dynolog_door.trace_request import RequestedTrace, requested_trace
from support.dynolog import recorded

NOW_NS = 1_999_999_990 * 10**9


def of(sent: bytes) -> RequestedTrace:
    return requested_trace(read_object(sent[4:])["config"], [9, 7], NOW_NS)


def test_iterations_fall_back_to_a_timed_trace_as_in_libkineto() -> None:
    found = of(recorded.ITERATIONS)
    assert found.spec == pb.CaptureSpec(
        selector=pb.Selector(pids=[7, 9]),
        iterations=pb.IterationWindow(count=4, roundup=1),
        options=pb.Options(),
        formats=["chrome-json"],
        labels={"dynolog.log_file": "/tmp/gpu_profile_123.json"},
        or_duration_ns=500_000_000,
    )
    assert found.log_file is not None
    assert found.log_file.directory == Path("/tmp")
    assert found.log_file.name(7, "chrome-json", alone=False) == "gpu_profile_123_7.json"


def test_a_start_time_is_kept() -> None:
    spec = of(recorded.JOB).spec
    assert (spec.start_time_ns, spec.duration_ns) == (1_999_999_999_999 * 10**6, 500_000_000)


def test_a_memory_profile_is_a_snapshot_and_nothing_else() -> None:
    found = of(recorded.MEMORY)
    assert (list(found.spec.activity_types), found.spec.duration_ns) == (["memory_snapshot"], 200_000_000)
    assert any("PROFILE_MEMORY requests only a snapshot" in note for note in found.notes)


def test_dynologs_own_form_of_the_text_is_read() -> None:
    text = "\n    ACTIVITIES_DURATION_MSECS=200\nACTIVITY_TYPES=kernel\nPROFILE_WITH_FLOPS=1\n    REQUEST_TRACE_ID=42"
    found = requested_trace(text, [7], NOW_NS)
    assert dict(found.spec.labels) == {"request_trace_id": "42"}
    assert (list(found.spec.activity_types), found.spec.options.with_flops) == (["kernel"], False)
    assert "describes cpu_op, which is not recorded" in found.notes[0]
    assert found.log_file is None and not found.spec.formats


@pytest.mark.parametrize(
    ("line", "recorder"),
    [("", 0), ("REQUEST_RECORDER=agent", pb.RECORDER_AGENT), (" REQUEST_RECORDER = Kineto ", pb.RECORDER_KINETO)],
)
def test_a_key_of_ours_says_who_records(line: str, recorder: int) -> None:
    assert requested_trace(f"ACTIVITIES_DURATION_MSECS=200\n{line}\n", [7], NOW_NS).spec.recorder == recorder


def test_mistakes_are_named() -> None:
    with pytest.raises(KinetoConfigError, match="REQUEST_RECORDER: expected agent or kineto, got 'dcgm'"):
        requested_trace("REQUEST_RECORDER=dcgm", [7], NOW_NS)
    with pytest.raises(KinetoConfigError, match="line 1: ACTIVITIES_DURATION_MSECS: expected a whole number"):
        requested_trace("ACTIVITIES_DURATION_MSECS=abc", [7], NOW_NS)


@pytest.mark.parametrize("path", ["s3://bucket/t.json", "Manifold://bucket/t.json", "/tmp/", ".."])
def test_a_place_that_is_no_file_of_this_host_leaves_the_trace_in_the_store(path: str) -> None:
    found = requested_trace(f"ACTIVITIES_LOG_FILE={path}", [7], NOW_NS)
    assert found.log_file is None
    assert found.notes[-1].endswith("; the trace is in the store only")
