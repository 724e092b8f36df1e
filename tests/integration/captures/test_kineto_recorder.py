"""Captures by a process's own libkineto, which is this process: what it does and what it leaves, and the verdicts."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace import open_trace
from kinetod.base.libc import LIBC
from support.peers.on_demand_kineto import (
    POLL_PAUSE_S,
    OnDemandKineto,
    event,
    on_demand_kineto,
    polls_in,
    trace_text,
)
from support.service.daemon import IMPORT_PATH, Daemon, error_of, running_daemon, watch_to_end
from support.waiting import scaled, until

SECOND_NS = 10**9
OWN = pb.Selector(pids=[os.getpid()])


@contextmanager
def daemon_with(*options: str, **environ: str) -> Iterator[tuple[Daemon, Path]]:
    """A daemon that answers polls in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="dynolog-") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        settings = {**polls_in(name), **environ}
        with running_daemon(*options, environ=settings) as started:
            yield started, folder


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Daemon, Path]]:
    with daemon_with("--max-trace-bytes", "4MiB") as started:
        yield started


@pytest.fixture
def stub(served: tuple[Daemon, Path]) -> ProfilerStub:
    return served[0].stub()


@pytest.fixture
def kineto(served: tuple[Daemon, Path]) -> Iterator[OnDemandKineto]:
    with on_demand_kineto(served[1]) as process:
        yield process


def create(stub: ProfilerStub, **fields: Any) -> pb.Capture:
    if "iterations" not in fields:
        fields.setdefault("duration_ns", SECOND_NS)
    spec = pb.CaptureSpec(**{"selector": OWN, "recorder": pb.RECORDER_KINETO, **fields})
    capture: pb.Capture = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    return capture


def ended(stub: ProfilerStub, capture: pb.Capture) -> pb.Target:
    (target,) = watch_to_end(stub, capture.id).targets
    return target


def verdict(target: pb.Target) -> tuple[str, str]:
    return pb.Verdict.Name(target.verdict), target.reason_code


def state_of(stub: ProfilerStub, capture: pb.Capture) -> pb.TargetState:
    found: pb.Capture = stub.GetCapture(pb.GetCaptureRequest(id=capture.id), timeout=scaled(10))
    return found.targets[0].state


def fetched(stub: ProfilerStub, capture: pb.Capture, name: str) -> bytes:
    request = pb.FetchTraceRequest(capture_id=capture.id, pid=os.getpid(), format=name)
    return b"".join(chunk.data for chunk in stub.FetchTrace(request, timeout=20))


def test_the_trace_is_the_file_that_libkineto_wrote(
    stub: ProfilerStub, kineto: OnDemandKineto, served: tuple[Daemon, Path], tmp_path: Path
) -> None:
    capture = create(stub, formats=["chrome", "chrome-json", "perfetto"], labels={"team": "vision"})
    assert capture.targets[0].recorder == pb.RECORDER_KINETO
    request = kineto.take()
    assert (request["ACTIVITIES_DURATION_MSECS"], request["PROFILE_START_TIME"]) == ("1000", "0")
    data = kineto.write()
    target = ended(stub, capture)
    assert verdict(target) == ("VERDICT_DONE", "")
    assert fetched(stub, capture, "chrome-json") == data
    assert gzip.decompress(fetched(stub, capture, "chrome")) == data
    assert dict(target.summary.activities) == {"cpu_op": 2}
    assert (target.recorder, target.HasField("attach"), target.HasField("overhead")) == (
        pb.RECORDER_KINETO,
        False,
        False,
    )
    assert not kineto.path.exists()
    stored = next((served[0].state_dir / "captures" / capture.id / "targets").iterdir())
    assert sorted(path.name for path in stored.iterdir()) == [
        *("columns", "target.json", "trace.json", "trace.json.gz", "trace.pftrace"),
    ]
    trace = open_trace(stored)
    assert (trace.target.capture_id, trace.target.labels) == (capture.id, {"team": "vision"})
    assert len(trace.table("cpu_op")) == 2


def test_clients_see_what_the_polls_and_the_file_tell(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    assert state_of(stub, capture) == pb.TARGET_STATE_PENDING
    kineto.take()
    kineto.is_busy()
    until(lambda: state_of(stub, capture) == pb.TARGET_STATE_WARMUP, "the poll is heard of")
    kineto.temporary.touch()
    until(lambda: state_of(stub, capture) == pb.TARGET_STATE_COLLECT, "the open file is seen")
    kineto.temporary.write_text("{")
    until(lambda: state_of(stub, capture) == pb.TARGET_STATE_PROCESS, "the file is seen to grow")
    kineto.write()
    assert verdict(ended(stub, capture)) == ("VERDICT_DONE", "")


def test_a_request_is_sent_once_and_polls_are_answered_again_when_the_file_shows(
    stub: ProfilerStub, kineto: OnDemandKineto
) -> None:
    capture = create(stub)
    kineto.take()
    assert kineto.client.poll(patience_s=0.3) is None  # it may have to read an earlier answer first
    kineto.temporary.touch()
    until(lambda: state_of(stub, capture) == pb.TARGET_STATE_COLLECT, "the open file is seen")
    assert kineto.poll() == ""
    kineto.write()
    assert verdict(ended(stub, capture)) == ("VERDICT_DONE", "")


def test_an_empty_trace_is_of_a_program_that_does_not_train_yet(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    kineto.write(trace_text(kineto.take()["REQUEST_TRACE_ID"], []))
    target = ended(stub, capture)
    assert verdict(target) == ("VERDICT_FAILED", "NOT_TRAINING_YET")
    assert not target.files


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (trace_text(1), "has the trace id '1', not"),
        ('{"traceEvents": []}', "has no trace id"),
        ('{"schemaVersion": 1, "traceEvents": [' + json.dumps(event("aten::mm", 1.0, 2.0)), "is incomplete"),
        ("", "is empty"),
        ("no trace", "does not begin like a libkineto trace"),
    ],
    ids=["of another request", "of nobody", "truncated", "empty", "something else"],
)
def test_a_file_that_is_not_the_trace_is_damaged(
    stub: ProfilerStub, kineto: OnDemandKineto, text: str, why: str
) -> None:
    capture = create(stub)
    kineto.take()
    kineto.write(text)
    target = ended(stub, capture)
    assert verdict(target) == ("VERDICT_FAILED", "FILE_DAMAGED")
    assert why in target.reason


def test_a_link_in_the_files_place_is_refused(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    kineto.take()
    kineto.path.symlink_to("/etc/shadow")
    target = ended(stub, capture)
    assert verdict(target) == ("VERDICT_FAILED", "FILE_DAMAGED")
    assert "a symbolic link" in target.reason


def test_a_file_beyond_the_limit_is_not_kept(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    kineto.take()
    kineto.write("{" + " " * (5 << 20))
    assert verdict(ended(stub, capture)) == ("VERDICT_FAILED", "TRACE_LIMIT")
    assert not kineto.path.exists()


def test_a_profiler_that_is_free_again_without_a_file_was_cancelled(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    kineto.take()
    kineto.is_busy()
    kineto.temporary.touch()
    until(lambda: state_of(stub, capture) == pb.TARGET_STATE_COLLECT, "the open file is seen")
    assert kineto.poll() == ""
    assert verdict(ended(stub, capture)) == ("VERDICT_FAILED", "CANCELLED_BY_PROGRAM")
    until(lambda: kineto.poll() or not kineto.temporary.exists(), "what it left is removed", pause_s=POLL_PAUSE_S)


def test_a_capture_that_is_cancelled_before_the_poll_is_never_sent(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    stub.CancelCapture(pb.CancelCaptureRequest(id=capture.id), timeout=scaled(20))
    assert verdict(ended(stub, capture)) == ("VERDICT_CANCELLED", "CANCELLED")
    assert kineto.poll() == ""


def test_the_file_of_a_capture_that_was_cancelled_later_is_removed(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    kineto.take()
    stub.CancelCapture(pb.CancelCaptureRequest(id=capture.id), timeout=scaled(20))
    target = ended(stub, capture)
    assert verdict(target) == ("VERDICT_CANCELLED", "CANCELLED")
    assert "libkineto cannot be stopped" in target.reason
    kineto.write()
    until(lambda: not kineto.path.exists(), "the file is removed")


def test_a_cancellation_that_keeps_what_is_recorded_waits_for_the_whole_trace(
    stub: ProfilerStub, kineto: OnDemandKineto
) -> None:
    capture = create(stub)
    kineto.take()
    cancelled = stub.CancelCapture.future(pb.CancelCaptureRequest(id=capture.id, keep_partial=True), timeout=scaled(30))
    kineto.is_busy()
    kineto.write()
    target = ended(stub, capture)
    assert verdict(target) == ("VERDICT_DONE", "")
    cancelled.result()


def test_one_process_records_one_capture(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub)
    for recorder in (pb.RECORDER_KINETO, pb.RECORDER_UNSPECIFIED, pb.RECORDER_AGENT):
        _, reason, text = error_of(lambda chosen=recorder: create(stub, recorder=chosen))  # type: ignore[misc]
        assert (reason, capture.id in text) == ("BUSY", True)
    kineto.take()
    kineto.write()
    assert verdict(ended(stub, capture)) == ("VERDICT_DONE", "")


def test_a_process_whose_profiler_records_for_somebody_else_is_busy(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    kineto.is_busy()
    _, reason, text = error_of(lambda: create(stub))
    assert (reason, "is already armed or recording" in text) == ("BUSY", True)


def test_an_armed_capture_is_offered_once_it_is_started(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    capture = create(stub, arm_ns=60 * SECOND_NS)
    assert kineto.poll() == ""
    stub.StartCapture(pb.StartCaptureRequest(id=capture.id), timeout=scaled(10))
    kineto.take()
    kineto.write()
    assert verdict(ended(stub, capture)) == ("VERDICT_DONE", "")


def test_what_libkineto_cannot_record_is_refused(stub: ProfilerStub, kineto: OnDemandKineto) -> None:
    _, reason, text = error_of(lambda: create(stub, activity_types=["memory_snapshot"]))
    assert (reason, "libkineto cannot record memory_snapshot" in text) == ("LIBKINETO_UNAVAILABLE", True)


def test_without_an_agent_the_processs_own_libkineto_records_and_says_so(
    stub: ProfilerStub, kineto: OnDemandKineto
) -> None:
    capture = create(stub, recorder=pb.RECORDER_UNSPECIFIED, no_attach=True)
    kineto.take()
    kineto.write()
    target = ended(stub, capture)
    assert (verdict(target), target.recorder) == (("VERDICT_DONE", ""), pb.RECORDER_KINETO)


POLLING_CHILD = """
import sys
from pathlib import Path
from support.peers.on_demand_kineto import on_demand_kineto
with on_demand_kineto(Path(sys.argv[1])) as kineto:
    print("polls", flush=True)
    sys.stdin.readline()
    kineto.take()
    kineto.write()
    sys.stdin.readline()
"""
PTRACE_SEIZE = 0x4206


@pytest.mark.skipif(os.geteuid() != 0, reason="to trace the child takes root under ptrace_scope")
def test_a_process_that_no_agent_can_enter_is_recorded_by_its_own_libkineto_and_the_result_says_why(
    stub: ProfilerStub, served: tuple[Daemon, Path]
) -> None:
    command = [sys.executable, "-c", POLLING_CHILD, str(served[1])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), IMPORT_PATH])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == b"polls\n"
            assert LIBC.ptrace(PTRACE_SEIZE, child.pid, 0, 0) == 0  # a debugger, which lets it run
            selector = pb.Selector(pids=[child.pid])
            _, reason, text = error_of(lambda: create(stub, selector=selector, recorder=pb.RECORDER_AGENT))
            assert reason == "ATTACH_TRACED"
            capture = create(stub, selector=selector, recorder=pb.RECORDER_UNSPECIFIED)
            child.stdin.write(b"\n")
            child.stdin.flush()
            target = ended(stub, capture)
            assert (verdict(target), target.recorder) == (("VERDICT_DONE", ""), pb.RECORDER_KINETO)
            assert list(target.warnings) == [
                f"recorded by the process's own libkineto, since no agent can be attached: {text}"
            ]
        finally:
            child.kill()


def test_a_selector_takes_only_those_that_poll_if_libkineto_is_to_record(
    stub: ProfilerStub, kineto: OnDemandKineto
) -> None:
    capture = create(stub, selector=pb.Selector(command_regex="python|pytest", user=str(os.geteuid())))
    assert [target.pid for target in capture.targets] == [os.getpid()]
    kineto.take()
    kineto.write()
    assert verdict(ended(stub, capture)) == ("VERDICT_DONE", "")


def test_a_process_that_does_not_poll_is_told_what_to_do(stub: ProfilerStub) -> None:
    selector = pb.Selector(pids=[os.getppid()])
    _, reason, text = error_of(lambda: create(stub, selector=selector))
    assert (reason, "KINETO_USE_DAEMON=1" in text) == ("NOT_POLLING", True)


def test_a_daemon_that_answers_no_polls_says_which_setting_is_missing(daemon: Daemon) -> None:
    _, reason, text = error_of(lambda: create(daemon.stub()))
    assert (reason, "dynolog.ipc" in text) == ("NOT_POLLING", True)


@pytest.mark.slow  # a daemon of its own; the rules are tested without
def test_the_policy_refuses_whatever_a_request_says() -> None:
    with daemon_with(KINETOD_DYNOLOG_TRACING="refuse") as (started, folder), on_demand_kineto(folder):
        for recorder in (pb.RECORDER_KINETO, pb.RECORDER_UNSPECIFIED, pb.RECORDER_AGENT):
            refused = error_of(lambda chosen=recorder: create(started.stub(), recorder=chosen))  # type: ignore[misc]
            assert refused[1] == "TRACING_REFUSED"


@pytest.mark.slow  # likewise
def test_the_setting_may_leave_all_polling_processes_to_their_libkineto() -> None:
    with daemon_with(KINETOD_DYNOLOG_TRACING="kineto") as (started, folder), on_demand_kineto(folder) as kineto:
        capture = create(started.stub(), recorder=pb.RECORDER_UNSPECIFIED)
        kineto.take()
        kineto.write()
        assert ended(started.stub(), capture).recorder == pb.RECORDER_KINETO


@pytest.mark.parametrize("written", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_the_next_daemon_fetches_the_file_that_a_killed_one_asked_for(written: str) -> None:
    with daemon_with() as (started, folder), on_demand_kineto(folder) as kineto:
        capture = create(started.stub(), formats=["chrome-json"])
        kineto.take()
        kineto.is_busy()
        until(lambda: state_of(started.stub(), capture) == pb.TARGET_STATE_WARMUP, "the poll is heard of")
        started.kill()
        data = kineto.write() if written == "before" else b""
        started.start()
        data = data or kineto.write()
        assert verdict(ended(started.stub(), capture)) == ("VERDICT_DONE", "")
        assert fetched(started.stub(), capture, "chrome-json") == data
        assert not kineto.path.exists()


@pytest.mark.slow  # it waits for the trace as long as a stop may take
def test_a_daemon_that_is_stopped_leaves_the_trace_to_the_next_one() -> None:
    with daemon_with() as (started, folder), on_demand_kineto(folder) as kineto:
        capture = create(started.stub())
        kineto.take()
        kineto.is_busy()
        until(lambda: state_of(started.stub(), capture) == pb.TARGET_STATE_WARMUP, "the poll is heard of")
        started.stop()
        kineto.write()
        started.start()
        assert verdict(ended(started.stub(), capture)) == ("VERDICT_DONE", "")


@pytest.mark.slow  # a daemon of its own, twice
def test_a_request_that_no_poll_has_fetched_ends_with_the_daemon() -> None:
    with daemon_with() as (started, folder), on_demand_kineto(folder) as kineto:
        capture = create(started.stub())
        until(lambda: list(started.state_dir.glob("captures/*/targets/*/target.json")), "the request is noted")
        started.kill()
        started.start()
        # At the first poll it could have read what the killed daemon had sent.
        until(
            lambda: kineto.poll() or state_of(started.stub(), capture) == pb.TARGET_STATE_ENDED, "free twice", pause_s=1
        )
        target = ended(started.stub(), capture)
        assert verdict(target) == ("VERDICT_FAILED", "DAEMON_RESTARTED")
        assert "had not fetched the request yet" in target.reason
