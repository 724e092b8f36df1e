"""Arguments are read as Dynolog reads them."""

import struct
from typing import Any

import pytest
from kinetod.dynolog_door.requests import (
    MAX_REQUEST_BYTES,
    PAUSE,
    TRACE,
    Asked,
    BadFrame,
    DcgmPauseAsked,
    DcgmResumeAsked,
    StatusAsked,
    TraceAsked,
    VersionAsked,
    WrongArgument,
    arguments_of,
    body_size,
    frame,
    function_of,
    read_object,
)
from support.dynolog import recorded


def read(sent: bytes) -> Asked:
    request = read_object(sent[4:])
    return arguments_of(function_of(request), request)


def test_each_command_of_dyno_is_understood() -> None:
    assert read(recorded.STATUS) == StatusAsked()
    assert read(recorded.VERSION) == VersionAsked()
    assert read(recorded.PAUSE) == DcgmPauseAsked()
    assert read(recorded.RESUME) == DcgmResumeAsked()
    traced = read(recorded.ITERATIONS)
    assert isinstance(traced, TraceAsked)
    assert (sorted(traced.pids), traced.job_id, traced.process_limit) == ([4242], 0, 1)
    assert traced.config.splitlines()[3] == "ACTIVITIES_ITERATIONS=4"


def test_the_pid_0_alone_and_no_pid_mean_every_process() -> None:
    every = read(recorded.JOB)
    assert isinstance(every, TraceAsked)
    assert (every.pids, every.job_id, every.process_limit) == (frozenset(), 77, 3)
    assert traced(pids=[]).pids == frozenset()
    assert traced(pids=[0, 5]).pids == {0, 5}


def traced(**arguments: Any) -> TraceAsked:
    found = arguments_of(TRACE, {"config": "", "pids": [1], **arguments})
    assert isinstance(found, TraceAsked)
    return found


def test_what_may_be_missing_has_dynologs_defaults() -> None:
    assert (traced().job_id, traced().process_limit) == (0, 1000)
    assert traced(job_id=2**64 - 1).job_id == 2**64 - 1
    assert traced(pids=[1.9, True, 2]).pids == {1, 2}


@pytest.mark.parametrize("request_", [{}, {"fn": "getstatus"}, {"fn": 1}, {"fn": None}, {"config": ""}])
def test_an_unknown_function_gets_no_answer(request_: dict[str, Any]) -> None:
    with pytest.raises(BadFrame):
        function_of(request_)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"pids": []}, "config is missing"),
        ({"config": ""}, "pids is missing"),
        ({"config": 1, "pids": []}, "config must be a string, got 1"),
        ({"config": "", "pids": "1"}, "pids must be a list of numbers, got '1'"),
        ({"config": "", "pids": ["1"]}, r"pids\[0\] must be a number, got '1'"),
        ({"config": "", "pids": [2**64]}, r"pids\[0\] is out of range"),
        ({"config": "", "pids": [float("inf")]}, r"pids\[0\] is out of range"),
        ({"config": "", "pids": [1] * 4097}, "pids has 4097 numbers; at most 4096"),
        ({"config": "", "pids": [], "job_id": "77"}, "job_id must be a number, got '77'"),
        ({"config": "", "pids": [], "process_limit": None}, "process_limit must be a number, got None"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(WrongArgument, match=problem):
        arguments_of(TRACE, arguments)


@pytest.mark.parametrize("arguments", [{}, {"duration_s": "5"}])
def test_a_pause_needs_its_length(arguments: dict[str, Any]) -> None:
    with pytest.raises(WrongArgument, match="duration_s"):
        arguments_of(PAUSE, arguments)


def test_a_length_is_an_int32_in_the_hosts_byte_order() -> None:
    assert body_size(struct.pack("=i", 18)) == 18
    assert body_size(struct.pack("=i", MAX_REQUEST_BYTES)) == MAX_REQUEST_BYTES


@pytest.mark.parametrize("size", [0, -1, MAX_REQUEST_BYTES + 1, -(2**31), 2**31 - 1])
def test_a_length_that_no_request_has_is_refused_before_anything_is_read(size: int) -> None:
    with pytest.raises(BadFrame, match="bytes; a request has"):
        body_size(struct.pack("=i", size))


def test_what_dyno_sends_is_read() -> None:
    for sent in (recorded.STATUS, recorded.PAUSE, recorded.ITERATIONS, recorded.JOB, recorded.MEMORY):
        assert body_size(sent[:4]) == len(sent) - 4
        assert "fn" in read_object(sent[4:])
    assert read_object(b'\xef\xbb\xbf{"fn":1}') == {"fn": 1}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b"1", b'{"a":NaN}', b'{"a":"\xff"}', b"[" * 60_000, b'"\\ud800"', recorded.QUOTE[4:]],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrame):
        read_object(body)


def test_an_answer_is_compact_with_members_in_order() -> None:
    assert frame({"b": [1, 2], "a": "ü"}) == struct.pack("=i", 20) + b'{"a":"\xc3\xbc","b":[1,2]}'
    assert frame({"a": "\ud800"})[4:] == b'{"a":"?"}'
