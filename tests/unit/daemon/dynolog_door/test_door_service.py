"""Configuration texts of Dynolog's clients become captures."""

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_protos.kineto_config import KinetoConfigError
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import Reason, invalid
from kinetod.dynolog_door import door_service
from kinetod.dynolog_door.door_service import (
    MAX_REQUEST_BYTES,
    PAUSE,
    TRACE,
    Asked,
    BadFrame,
    DcgmPauseAsked,
    DcgmResumeAsked,
    MatchedProcesses,
    ProcessMatcher,
    RequestedTrace,
    StatusAsked,
    TraceAsked,
    TraceStarted,
    VersionAsked,
    WrongArgument,
    arguments_of,
    body_size,
    claims,
    frame,
    function_of,
    limited,
    read_object,
    requested_trace,
)
from kinetod.processes.identity import ProcessKey
from support.dynolog import recorded
from support.service.callers import ROOT

NOW_NS = 1_999_999_990 * 10**9


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
    with pytest.raises(BadFrame, match="bytes; expected 1 to"):
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
    assert found.notes[-1].endswith("; the trace is kept only in the store")


NONE = {
    "processesMatched": [], "activityProfilersTriggered": [], "activityProfilersBusy": 0,
    "eventProfilersTriggered": [], "eventProfilersBusy": 0,
}  # fmt: skip


def test_the_state_is_dynologs_number() -> None:
    assert door_service.status(healthy=True) == {"status": 1}
    assert door_service.status(healthy=False) == {"status": 0}


def test_nothing_is_paused_and_the_answer_says_so_as_dynolog_without_its_gpu_monitor() -> None:
    assert door_service.dcgm()["status"] is False


def test_only_what_is_really_traced_is_listed() -> None:
    capture = pb.Capture(id="c")
    capture.targets.add(pid=7)
    capture.targets.add(pid=8, verdict=pb.VERDICT_FAILED, reason_code="ATTACH_SECCOMP", reason="it may not")
    matched = MatchedProcesses(free=(7, 8), busy=2, beyond=5)
    assert door_service.started(TraceStarted(matched=matched, capture=capture, log_file="not written: why")) == {
        **NONE,
        "processesMatched": [7],
        "activityProfilersTriggered": [7],
        "activityProfilersBusy": 2,
        "kinetod": {
            "capture": "c",
            "log_file": "not written: why",
            "notes": ["5 more processes match, beyond process_limit (--process-limit)"],
            "refused": [{"pid": 8, "reason": "ATTACH_SECCOMP", "message": "it may not"}],
        },
    }
    assert door_service.started(TraceStarted(matched=MatchedProcesses())) == NONE


def test_every_refusal_of_a_trace_has_the_list_that_dyno_unwraps() -> None:
    refused = door_service.refused(door_service.TRACE, invalid("config", "is empty"))
    assert refused == {
        **NONE, "status": "failed: config: is empty",
        "kinetod": {"reason": Reason.INVALID_FIELD, "message": "config: is empty"},
    }  # fmt: skip
    assert door_service.wrong_argument(door_service.TRACE, "x") == {**NONE, "status": "failed with exception = x"}
    assert door_service.internal_error(door_service.TRACE).items() >= NONE.items()
    assert door_service.wrong_argument(door_service.PAUSE, "x") == {"status": "failed with exception = x"}


def asked(pids: Sequence[int] = (), job_id: int = 0, process_limit: int = 3) -> TraceAsked:
    return TraceAsked(config="", pids=frozenset(pids), job_id=job_id, process_limit=process_limit)


@dataclass
class Poller:
    """A process that polls."""

    key: ProcessKey
    pids: tuple[int, ...] = ()
    job_id: int = 0
    tracing: bool = False
    uid: int = 0
    gid: int = 0
    last_poll_ns: int = 0

    def offer(self, _configuration: bytes, _on_event: object) -> Any:
        raise AssertionError("matching offers nothing")


@dataclass
class Processes:
    """A registry of processes. busy: pids whose agent records."""

    known: dict[int, str] = field(default_factory=dict)  # pid -> job
    busy: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)  # that exist and no capture would take by itself
    asked: list[Any] = field(default_factory=list)

    async def processes(self, match: Any, _caller: object, **_how: bool) -> list[pb.Process]:
        self.asked.append(match)
        return [pb.Process(pid=pid, start_time_ns=1, job_id=job) for pid, job in self.known.items()]

    def agent(self, key: ProcessKey) -> Any:
        return SimpleNamespace(capture_id="c") if key.pid in self.busy else None

    async def candidates(self, pids: Sequence[int]) -> list[Any]:
        found = [pid for pid in pids if pid in self.others]
        return [SimpleNamespace(key=ProcessKey(pid, 1), visible_to=lambda _caller: True) for pid in found]


def matched(processes: Processes, request: TraceAsked, pollers: Sequence[Poller] = ()) -> MatchedProcesses:
    polling: Any = SimpleNamespace(all=lambda: list(pollers))
    matcher = ProcessMatcher(processes, polling)  # type: ignore[arg-type]  # what of it is used
    return asyncio.run(matcher.matched(request, ROOT))


def test_a_limit_counts_processes_that_are_not_traced_yet() -> None:
    found = [(5, False), (3, True), (4, False), (9, False)]
    assert limited(found, 2) == MatchedProcesses(free=(4, 5), busy=1, beyond=1)
    assert limited(found, 0) == MatchedProcesses(free=(), busy=1, beyond=3)
    assert limited(found, -1) == MatchedProcesses(free=(4, 5, 9), busy=1)


def test_pids_mean_processes_and_what_descends_from_them_in_any_job() -> None:
    processes = Processes({7: "77"}, busy={7})
    assert matched(processes, asked([5, 0, -1])) == MatchedProcesses(busy=1)
    assert (processes.asked[0].pids, processes.asked[0].children, processes.asked[0].job_ids) == ({5}, True, set())
    assert matched(processes, asked([-1])) == MatchedProcesses()


def test_without_pids_the_job_0_means_processes_without_a_job() -> None:
    processes = Processes({7: "77", 8: ""})
    assert matched(processes, asked()).free == (8,)
    assert matched(processes, asked(job_id=77)).free == (7, 8)  # the registry selects by the job
    assert processes.asked[1].job_ids == {"77"}


@pytest.mark.parametrize(
    ("request_", "means"),
    [
        (asked([7]), True),
        (asked([1]), True),
        (asked([100]), True),
        (asked([8]), False),
        (asked([7], job_id=77), True),
        (asked([7], job_id=78), False),
        (asked(job_id=77), True),
        (asked(), False),
    ],
)
def test_what_a_polling_process_says_of_itself_counts(request_: TraceAsked, means: bool) -> None:
    assert claims(Poller(ProcessKey(100, 1), pids=(7, 1), job_id=77), request_) is means


def test_a_polling_process_that_nothing_else_shows_is_found_and_may_be_busy() -> None:
    pollers = [Poller(ProcessKey(100, 1)), Poller(ProcessKey(101, 1), tracing=True), Poller(ProcessKey(102, 2))]
    found = matched(Processes({101: ""}, others={100, 102}), asked(), pollers)
    assert found == MatchedProcesses(free=(100,), busy=1)  # 102 is another process by now
