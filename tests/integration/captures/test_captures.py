"""Captures from the request to the verdict, with agents that do what the test says."""

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_agent.protocol import arena, wire
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent
from support.service.daemon import Daemon, error_of, running_daemon, watch_to_end
from support.waiting import scaled

SECOND_NS = 10**9
OWN = pb.Selector(pids=[os.getpid()])
ANSWER_NS = 4 * SECOND_NS  # of an impatient daemon; what its agents do at all, they do at once


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon("--max-duration", "1min") as started:
        yield started


@pytest.fixture(scope="module")
def impatient() -> Iterator[Daemon]:
    """For tests that wait for its deadlines."""
    with running_daemon("--agent-deadline", f"{ANSWER_NS}ns", "--process-deadline", "500ms") as started:
        yield started


@pytest.fixture
def stuck(impatient: Daemon) -> Iterator[ScriptedAgent]:
    """An agent that is connected to it."""
    with ScriptedAgent(impatient.agent_socket) as connected:
        connected.hello()
        yield connected


def create(stub: ProfilerStub, key: str = "", **fields: Any) -> pb.Capture:
    spec = pb.CaptureSpec(**{"selector": OWN, "duration_ns": SECOND_NS, **fields})
    capture: pb.Capture = stub.CreateCapture(
        pb.CreateCaptureRequest(spec=spec, idempotency_key=key), timeout=scaled(10)
    )
    return capture


def only_target(capture: pb.Capture) -> pb.Target:
    (target,) = capture.targets
    return target


def test_a_capture_is_done_and_its_file_can_be_fetched(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub, labels={"run": "1"})
    assert created.status == pb.CAPTURE_STATUS_RUNNING
    assert only_target(created).state == pb.TARGET_STATE_PENDING
    start = agent.capture(samples=100)
    assert start.duration_ns == SECOND_NS
    assert start.buffer_limit_bytes == 128 << 20
    capture = watch_to_end(stub, created.id)
    target = only_target(capture)
    assert (capture.status, target.verdict, target.reason) == (pb.CAPTURE_STATUS_DONE, pb.VERDICT_DONE, "")
    (file,) = target.files
    chunks = list(stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture.id), timeout=scaled(10)))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[0].file == file
    assert file.format == "chrome"
    assert len(data) == file.size_bytes
    assert hashlib.sha256(data).hexdigest() == file.sha256
    (counts,) = target.counts
    assert (counts.source, counts.records, counts.dropped) == ("python_stacks", 100, 0)
    assert 0 < target.requested_ns <= target.collecting_ns <= target.collected_ns <= target.stored_ns
    assert target.overhead.stop_ns == 2000
    stored = stub.GetCapture(pb.GetCaptureRequest(id=capture.id), timeout=scaled(10))
    stored.ClearField("answer")  # comes after the end
    assert capture == stored


def test_an_activity_type_that_nobody_knows_is_refused_without_a_capture(
    stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    before = stub.ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10))
    code, reason, message = error_of(lambda: create(stub, activity_types=["python_function", "kernal"]))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert "spec.activity_types[1]: unknown activity type 'kernal' (did you mean kernel?)" in message
    assert message.endswith("the selected processes offer python_function")
    assert stub.ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)) == before


def test_a_fetch_resumes_at_an_offset(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    agent.capture()
    (file,) = only_target(watch_to_end(stub, created.id)).files

    def fetched(**fields: Any) -> bytes:
        request = pb.FetchTraceRequest(capture_id=created.id, **fields)
        return b"".join(chunk.data for chunk in stub.FetchTrace(request, timeout=10))

    whole = fetched(pid=os.getpid(), format="chrome")
    assert fetched(offset=100) == whole[100:]
    assert fetched(offset=file.size_bytes) == b""
    beyond = pb.FetchTraceRequest(capture_id=created.id, offset=file.size_bytes + 1)
    assert error_of(lambda: stub.FetchTrace(beyond, timeout=10))[:2] == (
        grpc.StatusCode.OUT_OF_RANGE,
        "OFFSET_BEYOND_END",
    )
    other = pb.FetchTraceRequest(capture_id=created.id, format="chrome-json")
    assert error_of(lambda: stub.FetchTrace(other, timeout=10))[1] == "NO_SUCH_FILE"
    nobody = pb.FetchTraceRequest(capture_id=created.id, pid=1)
    assert error_of(lambda: stub.FetchTrace(nobody, timeout=10))[1] == "NO_SUCH_TARGET"


def test_a_file_changed_behind_the_daemon_is_not_served(
    daemon: Daemon, stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    created = create(stub)
    agent.capture()
    watch_to_end(stub, created.id)
    (path,) = (daemon.state_dir / "captures" / created.id).rglob("trace.json.gz")
    path.write_bytes(path.read_bytes()[:-1])
    code, reason, _ = error_of(lambda: stub.FetchTrace(pb.FetchTraceRequest(capture_id=created.id), timeout=scaled(10)))
    assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "FILE_DAMAGED")


def test_every_state_is_seen_by_a_watcher_that_keeps_up(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    events = stub.WatchCapture(pb.WatchCaptureRequest(id=created.id), timeout=scaled(20))
    assert next(events).snapshot.id == created.id
    agent.await_start()
    agent.announce()
    states = []
    for name in ("WARMUP", "COLLECT", "PROCESS"):
        agent.state(name)
        states.append(next(event.target.state for event in events if event.HasField("target")))
        agent.record(10)
    agent.result()
    rest = list(events)
    states += [event.target.state for event in rest if event.HasField("target")]
    assert list(dict.fromkeys(states)) == [
        pb.TARGET_STATE_WARMUP,
        pb.TARGET_STATE_COLLECT,
        pb.TARGET_STATE_PROCESS,
        pb.TARGET_STATE_STORE,
        pb.TARGET_STATE_ENDED,
    ]
    assert rest[-1].snapshot.status == pb.CAPTURE_STATUS_DONE


def test_counts_are_reported_while_it_collects(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    events = stub.WatchCapture(pb.WatchCaptureRequest(id=created.id), timeout=scaled(20))
    agent.collect()
    agent.record(500)
    records = next(each.records for event in events for each in event.target.counts if each.records)
    assert records == 500
    agent.result()


def test_buffers_are_drained_while_it_collects(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub, buffer_limit_bytes=1 << 20, duration_ns=60 * SECOND_NS)  # the agent ends it before
    _, writer = agent.collect()
    events = stub.WatchCapture(pb.WatchCaptureRequest(id=created.id), timeout=scaled(60))
    per_round, rounds = 20_000, 5  # 2.4 MB through 1 MiB of buffers
    for number in range(1, rounds + 1):
        agent.record(per_round)
        for event in events:
            if any(each.records == number * per_round for each in event.target.counts):
                break
    agent.result()
    (counts,) = only_target(watch_to_end(stub, created.id)).counts
    assert (counts.records, counts.dropped) == (100_000, 0)
    assert writer.counts().dropped == 0


def test_lost_records_make_it_partial(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    _, writer = agent.collect()
    agent.record(10)
    for _ in range(3):
        writer.drop()
    agent.result()
    capture = watch_to_end(stub, created.id)
    target = only_target(capture)
    assert (capture.status, target.verdict) == (pb.CAPTURE_STATUS_PARTIAL, pb.VERDICT_PARTIAL)
    assert target.reason_code == "RECORDS_DROPPED"
    assert target.reason.startswith("records lost because the buffers were full: 3;")


def test_a_second_capture_of_the_same_process_is_refused_with_the_first_ones_id(
    stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    first = create(stub)
    code, reason, message = error_of(lambda: create(stub))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BUSY")
    assert f"capture {first.id} is running" in message
    agent.capture()
    assert watch_to_end(stub, first.id).status == pb.CAPTURE_STATUS_DONE


def test_a_selector_that_meets_a_busy_process_fails_only_that_target(
    daemon: Daemon, stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    first = create(stub)
    with RemoteAgent(daemon.agent_socket) as other:
        other.do("hello")
        second = create(stub, selector=pb.Selector(helpers=True))  # this process has started the other
        other.do("capture")
        capture = watch_to_end(stub, second.id)
    verdicts = {target.pid: (target.verdict, target.reason_code) for target in capture.targets}
    assert verdicts == {os.getpid(): (pb.VERDICT_FAILED, "BUSY"), other.pid: (pb.VERDICT_DONE, "")}
    assert capture.status == pb.CAPTURE_STATUS_PARTIAL
    agent.capture()
    watch_to_end(stub, first.id)


def test_an_agents_rejection_is_the_verdict(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    start = agent.await_start()
    agent.send(wire.Rejected(start.capture_id, "BUSY", "another daemon's capture", "theirs"))
    target = only_target(watch_to_end(stub, created.id))
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "BUSY")
    assert target.reason == "another daemon's capture (capture theirs)"


def test_a_target_whose_cupti_is_taken_is_told_who_else_profiles_here(
    stub: ProfilerStub, agent: ScriptedAgent, tmp_path: Path
) -> None:
    sleep = shutil.which("sleep")
    assert sleep
    (tmp_path / "ncu").symlink_to(sleep)
    with subprocess.Popen([tmp_path / "ncu", "60"]) as tool:
        try:
            created = create(stub)
            start = agent.await_start()
            agent.send(wire.Rejected(start.capture_id, "CUPTI_BUSY", "another tool uses CUPTI", ""))
            target = only_target(watch_to_end(stub, created.id))
        finally:
            tool.kill()
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "CUPTI_BUSY")
    assert target.reason.startswith("another tool uses CUPTI; other profilers on this host: ")
    assert re.search(rf"Nsight Compute \(.*\bpid {tool.pid}\b", target.reason)


def test_an_agent_that_never_answers_has_failed(impatient: Daemon, stuck: ScriptedAgent) -> None:
    created = create(impatient.stub())
    stuck.await_start()
    target = only_target(watch_to_end(impatient.stub(), created.id))
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "AGENT_SILENT")
    assert f"did not respond within {format_duration(ANSWER_NS)}" in target.reason
    assert not target.collected_ns
    assert stuck.expect(wire.Cancel).capture_id == created.id


def test_what_a_stuck_agent_has_recorded_is_kept(impatient: Daemon, stuck: ScriptedAgent) -> None:
    created = create(impatient.stub(), duration_ns=60 * SECOND_NS)
    stuck.collect()
    stuck.record(50)
    stuck.state("PROCESS")
    target = only_target(watch_to_end(impatient.stub(), created.id))
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "AGENT_STUCK")
    assert len(target.files) == 1


def test_a_cancelled_capture_keeps_nothing(daemon: Daemon, stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    agent.collect()
    agent.record(50)
    cancelling = stub.CancelCapture.future(pb.CancelCaptureRequest(id=created.id), timeout=scaled(20))
    agent.cancelled(created.id, keep=False)
    capture = cancelling.result()
    assert capture.status == pb.CAPTURE_STATUS_CANCELLED
    assert only_target(capture).verdict == pb.VERDICT_CANCELLED
    assert not list((daemon.state_dir / "captures" / created.id).rglob("*.*"))


def test_a_cancelled_capture_keeps_what_it_has_if_asked(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    agent.collect()
    agent.record(50)
    cancelling = stub.CancelCapture.future(
        pb.CancelCaptureRequest(id=created.id, keep_partial=True), timeout=scaled(20)
    )
    agent.cancelled(created.id)
    target = only_target(cancelling.result())
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "CANCELLED")
    assert len(target.files) == 1


def test_a_cancel_that_the_agent_does_not_confirm_ends_all_the_same(impatient: Daemon, stuck: ScriptedAgent) -> None:
    created = create(impatient.stub(), duration_ns=60 * SECOND_NS)
    stuck.await_start()
    stuck.state("COLLECT")
    capture = impatient.stub().CancelCapture(pb.CancelCaptureRequest(id=created.id), timeout=scaled(20))
    assert capture.status == pb.CAPTURE_STATUS_CANCELLED


def test_the_same_key_returns_the_same_capture(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    first = create(stub, key="key 1")
    again = create(stub, key="key 1")
    assert again.id == first.id
    code, reason, message = error_of(lambda: create(stub, key="key 1", duration_ns=2 * SECOND_NS))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")
    assert first.id in message
    agent.capture()
    watch_to_end(stub, first.id)
    assert create(stub, key="key 1").status == pb.CAPTURE_STATUS_DONE


def test_calls_with_the_same_key_at_once_make_one_capture(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    spec = pb.CaptureSpec(selector=OWN, duration_ns=SECOND_NS)
    request = pb.CreateCaptureRequest(spec=spec, idempotency_key="key 2")
    calls = [stub.CreateCapture.future(request, timeout=10) for _ in range(10)]
    (capture_id,) = {call.result().id for call in calls}
    agent.capture()
    assert only_target(watch_to_end(stub, capture_id)).verdict == pb.VERDICT_DONE


def test_a_running_capture_cannot_be_deleted_a_finished_one_is_gone(
    daemon: Daemon, stub: ProfilerStub, agent: ScriptedAgent
) -> None:
    created = create(stub)
    request = pb.DeleteCaptureRequest(id=created.id)
    code, reason, _ = error_of(lambda: stub.DeleteCapture(request, timeout=10))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPTURE_RUNNING")
    agent.capture()
    watch_to_end(stub, created.id)
    stub.DeleteCapture(request, timeout=10)
    assert (
        error_of(lambda: stub.GetCapture(pb.GetCaptureRequest(id=created.id), timeout=scaled(10)))[1]
        == "NO_SUCH_CAPTURE"
    )
    assert not (daemon.state_dir / "captures" / created.id).exists()


def test_captures_are_listed_newest_first_in_pages_and_by_label(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    made = []
    for number in range(3):
        made.append(create(stub, labels={"listed": "yes", "number": str(number)}).id)
        agent.capture(samples=1)
        watch_to_end(stub, made[-1])
    request = pb.ListCapturesRequest(labels={"listed": "yes"}, page_size=2)
    first = stub.ListCaptures(request, timeout=10)
    request.page_token = first.next_page_token
    second = stub.ListCaptures(request, timeout=10)
    assert [each.id for each in (*first.captures, *second.captures)] == made[::-1]
    assert second.next_page_token == ""
    labelled = stub.ListCaptures(pb.ListCapturesRequest(labels={"listed": "yes", "number": "1"}), timeout=scaled(10))
    assert [each.id for each in labelled.captures] == [made[1]]


def test_an_arena_that_lies_about_its_size_fails_the_target(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    start = agent.await_start()
    fd = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    agent.send(wire.Arena(start.capture_id, "cupti", "cupti/1", {}), [fd])
    os.close(fd)
    target = only_target(watch_to_end(stub, created.id))
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "BAD_ARENA")
    assert "its size is not sealed" in target.reason


def test_a_source_name_cannot_leave_the_folder(daemon: Daemon, stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    start = agent.await_start()
    fd = os.memfd_create("name")
    agent.send(wire.Arena(start.capture_id, "../../../escaped", "cupti/1", {}), [fd])
    os.close(fd)
    assert only_target(watch_to_end(stub, created.id)).reason_code == "BAD_ARENA"
    assert not list(daemon.root.rglob("escaped"))


def test_an_iteration_window_reaches_the_agent(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    window = pb.IterationWindow(count=5, start=100, roundup=10, warmup=2)
    request = pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=OWN, iterations=window))
    created = stub.CreateCapture(request, timeout=10)
    start = agent.capture()
    assert (start.duration_ns, start.iterations, start.start_iteration) == (None, 5, 100)
    assert (start.iteration_roundup, start.warmup_iterations) == (10, 2)
    watch_to_end(stub, created.id)


def test_many_watchers_all_see_the_end(stub: ProfilerStub, agent: ScriptedAgent) -> None:
    created = create(stub)
    ends: list[int] = []

    def watch() -> None:
        ends.append(watch_to_end(stub, created.id).status)

    threads = [threading.Thread(target=watch) for _ in range(30)]
    for thread in threads:
        thread.start()
    agent.capture(samples=arena.PAGE_BYTES)
    for thread in threads:
        thread.join(scaled(30))
    assert ends == [pb.CAPTURE_STATUS_DONE] * 30
