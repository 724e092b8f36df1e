"""Targets and daemons that die in the middle of a capture."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.captures.result import decode_pool
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent
from support.service.cli import kinetoctl
from support.service.daemon import STOP_DEADLINE_S, Daemon, DaemonFailed, running_daemon, watch_to_end
from support.service.pseudo_terminal import in_terminal
from support.waiting import scaled, until

SECOND_NS = 10**9


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    """One for a test that ends it."""
    with running_daemon() as started:
        yield started


def create(daemon: Daemon, *pids: int) -> str:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=pids), duration_ns=60 * SECOND_NS)
    capture_id: str = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10)).id
    return capture_id


def end_of(daemon: Daemon, capture_id: str) -> pb.Target:
    (target,) = watch_to_end(daemon.stub(), capture_id).targets
    return target


@contextmanager
def traced(daemon: Daemon, *lines: str) -> Iterator[tuple[RemoteAgent, str]]:
    """A process in a capture, which has done what these lines say; and the capture's id."""
    with RemoteAgent(daemon.agent_socket) as agent:
        agent.do("hello")
        capture_id = create(daemon, agent.pid)
        agent.do(*lines)
        yield agent, capture_id


def test_what_a_killed_target_had_recorded_becomes_a_partial_trace(daemon: Daemon) -> None:
    with traced(daemon, "collect", "record 100") as (agent, capture_id):
        agent.kill()
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")
    assert target.reason == f"process {agent.pid} ended during the capture: it was killed by SIGKILL"
    assert len(target.files) == 1
    assert sum(target.summary.activities.values()) > 0


def test_buffers_that_a_killed_target_had_only_completed_are_kept_too(daemon: Daemon) -> None:
    with traced(daemon, "await_start", "state COLLECT", "announce", "leave_completed 100") as (agent, capture_id):
        agent.kill()
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")
    assert len(target.files) == 1


def test_a_target_killed_before_its_window_has_failed_and_says_what_its_counts_say(daemon: Daemon) -> None:
    with traced(daemon, "await_start", "announce", "state WARMUP", "record 10") as (agent, capture_id):
        agent.kill()
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "TARGET_EXITED")
    assert sum(counts.records for counts in target.counts) == 10
    assert target.reason.endswith("none of the records made by then (10) is from the window, so none is kept")


def test_a_target_that_exits_with_a_result_is_partial(daemon: Daemon) -> None:
    with traced(daemon, "collect", "record 100") as (agent, capture_id):
        agent.do("state PROCESS", "result partial TARGET_EXITING 'the process exits'")
        agent.tell("exit 0")
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code, target.reason) == (
        pb.VERDICT_PARTIAL,
        "TARGET_EXITED",
        "the process exits",
    )
    assert len(target.files) == 1


def test_a_target_that_executes_another_program_is_partial_and_that_is_said(daemon: Daemon) -> None:
    with traced(daemon, "collect", "record 100") as (agent, capture_id):
        agent.tell("execute")
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_REPLACED")
    assert f"process {agent.pid} replaced itself with another program (exec) during the capture" in target.reason
    assert len(target.files) == 1


def test_a_target_that_exits_without_a_word_is_partial_and_its_status_known(daemon: Daemon) -> None:
    with traced(daemon, "collect", "record 100") as (agent, capture_id):
        agent.tell("exit 3")
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")
    assert target.reason == f"process {agent.pid} ended during the capture: it exited with status 3"


def test_a_forked_child_does_not_hide_the_death_of_the_target(daemon: Daemon) -> None:
    with traced(daemon, "collect", "record 100", "fork") as (agent, capture_id):
        agent.process.kill()  # the child still holds the socket and the memory
        agent.process.wait()
        target = end_of(daemon, capture_id)
        until(
            lambda: daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).agents == 0, "no agent is connected"
        )
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")


def test_a_fork_does_not_disturb_the_capture(daemon: Daemon) -> None:
    with traced(daemon, "collect", "record 100", "fork", "record 100") as (agent, capture_id):
        agent.do("state PROCESS", "result")
        target = end_of(daemon, capture_id)
    assert target.verdict == pb.VERDICT_DONE
    assert target.counts[0].records == 200


def test_a_link_lost_by_a_living_target_is_partial(daemon: Daemon) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        capture_id = create(daemon, os.getpid())
        agent.collect()
        agent.record(10)
        agent.sock.close()
        target = end_of(daemon, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "AGENT_LOST")


def has_records(event: pb.CaptureEvent) -> bool:
    """Whether it tells of some: the snapshot may come after they did."""
    return any(counts.records for target in (event.target, *event.snapshot.targets) for counts in target.counts)


def test_a_daemon_killed_in_the_middle_gives_a_true_verdict_after_its_restart(mortal: Daemon) -> None:
    with RemoteAgent(mortal.agent_socket) as recorded, RemoteAgent(mortal.agent_socket) as empty:
        recorded.do("hello")
        empty.do("hello")
        pids = pb.Selector(pids=[recorded.pid, empty.pid])
        spec = pb.CaptureSpec(selector=pids, duration_ns=60 * SECOND_NS, labels={"kept": "yes"})
        stub = mortal.stub()
        request = pb.CreateCaptureRequest(spec=spec, idempotency_key="before")
        capture_id = stub.CreateCapture(request, timeout=10).id
        events = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(20))
        recorded.do("collect", "record 100")
        empty.do("await_start", "state WARMUP")
        written = (mortal.state_dir / "captures" / capture_id).glob(f"targets/{recorded.pid}-*/raw/*/buffers.bin")
        next(event for event in events if has_records(event))
        assert [path.stat().st_size > 0 for path in written] == [True]
        leftover = mortal.state_dir / "captures" / capture_id / "targets" / ".half.tmp"
        leftover.write_bytes(b"half")
        (mortal.state_dir / "captures" / "never-recorded").mkdir()
        mortal.kill()
        mortal.start()
        stub = mortal.stub()
        capture = watch_to_end(stub, capture_id)
    ends = {target.pid: (target.verdict, target.reason_code, len(target.files)) for target in capture.targets}
    assert ends == {
        recorded.pid: (pb.VERDICT_PARTIAL, "DAEMON_RESTARTED", 1),
        empty.pid: (pb.VERDICT_FAILED, "DAEMON_RESTARTED", 0),
    }
    assert capture.status == pb.CAPTURE_STATUS_PARTIAL
    assert not leftover.exists()
    assert not (mortal.state_dir / "captures" / "never-recorded").exists()
    assert stub.CreateCapture(request, timeout=10).id == capture_id
    listed = stub.ListCaptures(pb.ListCapturesRequest(labels={"kept": "yes"}), timeout=scaled(10)).captures
    assert [each.status for each in listed] == [pb.CAPTURE_STATUS_PARTIAL]


@pytest.mark.slow
def test_records_that_ended_two_daemons_are_kept_and_not_decoded_again(mortal: Daemon) -> None:
    with traced(mortal, "collect", "record 100") as (agent, capture_id):
        events = mortal.stub().WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(20))
        next(event for event in events if has_records(event))
        mortal.kill()
        (raw,) = (mortal.state_dir / "captures" / capture_id).glob(f"targets/{agent.pid}-*/raw")
        for _ in range(decode_pool.MAX_TRIES):
            assert decode_pool.begin_try(raw.parent)
        mortal.start()
        target = end_of(mortal, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "DECODE_FAILED")
    assert f"gave up after 2 tries; the raw records are kept in {raw}" in target.reason
    assert list(raw.glob("*/buffers.bin"))


@pytest.mark.slow
def test_a_capture_whose_folder_is_gone_has_failed_after_a_restart(mortal: Daemon) -> None:
    with ScriptedAgent(mortal.agent_socket) as agent:
        agent.hello()
        capture_id = create(mortal, os.getpid())
        mortal.kill()
        (mortal.state_dir / "captures" / capture_id).rename(mortal.root / "moved")
        mortal.start()
        target = end_of(mortal, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "DAEMON_RESTARTED")
    assert "the target's folder is gone" in target.reason


@pytest.mark.slow
def test_a_stopped_daemon_keeps_what_was_recorded(mortal: Daemon) -> None:
    with ScriptedAgent(mortal.agent_socket) as agent:
        agent.hello()
        capture_id = create(mortal, os.getpid())
        agent.collect()
        agent.record(100)
        assert mortal.process is not None
        mortal.process.terminate()
        agent.cancelled(capture_id)
        assert mortal.process.wait(scaled(STOP_DEADLINE_S)) == 0  # a second signal might come when nobody handles it
        mortal.stop()
    mortal.start()
    target = end_of(mortal, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "DAEMON_STOPPED")
    assert len(target.files) == 1


@contextmanager
def stopped_workers(daemon: Daemon) -> Iterator[None]:
    """Nothing is decoded. They end with it: who is stopped does not see that a killed daemon has ended."""
    workers = psutil.Process(daemon.pid).children()
    try:
        for worker in workers:
            with suppress(psutil.NoSuchProcess):  # not all are workers: what looks at the host has its end
                worker.suspend()
        yield
    finally:
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        assert not psutil.wait_procs(workers, timeout=scaled(10))[1]


def decoding(daemon: Daemon) -> bool:
    return any(daemon.state_dir.glob("captures/*/targets/*/raw/ending.json"))


@pytest.mark.slow
def test_a_daemon_that_is_stopped_before_all_is_decoded_leaves_its_reason_to_the_next(mortal: Daemon) -> None:
    with traced(mortal, "collect", "record 100") as (_, capture_id), stopped_workers(mortal):
        assert mortal.stop() == 0
    mortal.start()
    target = end_of(mortal, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "DAEMON_STOPPED")
    assert len(target.files) == 1


def test_a_daemon_that_is_killed_while_it_decodes_leaves_its_reason_to_the_next(mortal: Daemon) -> None:
    with traced(mortal, "collect", "record 100") as (agent, capture_id), stopped_workers(mortal):
        agent.kill()
        until(lambda: decoding(mortal), "it is decoding")
        mortal.kill()
    mortal.start()
    target = end_of(mortal, capture_id)
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "TARGET_EXITED")
    assert target.reason == f"process {agent.pid} ended during the capture: it was killed by SIGKILL"


@pytest.mark.slow
def test_top_goes_on_when_its_daemon_is_back(mortal: Daemon) -> None:
    command = kinetoctl("--address", mortal.address, "top", "--all")
    with in_terminal(command, mortal.client_environ()) as terminal:
        terminal.until_text("processes, sorted by")
        for end in (mortal.stop, mortal.kill):
            end()
            terminal.until_text("no answer from")
            mortal.start()
            terminal.until(lambda lines: not any("no answer from" in line for line in lines), "the daemon answers")
        terminal.press("q")
        assert terminal.ended() == 0


@pytest.mark.slow
def test_a_killed_daemon_leaves_no_worker_behind(mortal: Daemon) -> None:
    workers = psutil.Process(mortal.pid).children()
    assert len(workers) >= 2
    mortal.kill()
    _, alive = psutil.wait_procs(workers, timeout=scaled(10))
    assert alive == []


def test_a_second_daemon_on_the_same_state_folder_is_refused(daemon: Daemon) -> None:
    (daemon.root / "second").mkdir()
    second = Daemon(daemon.root / "second", state_dir=daemon.state_dir)
    with pytest.raises(DaemonFailed, match=rf"another kinetod \(pid {daemon.pid}\) is already using the state folder"):
        second.start()


@pytest.mark.slow
def test_a_second_daemon_on_the_same_sockets_is_refused(mortal: Daemon) -> None:
    second = Daemon(mortal.root, state_dir=mortal.root / "other-state")
    with pytest.raises(DaemonFailed, match="is already using the agent socket"):
        second.start()
    assert mortal.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).version == "0.1.0"


def test_a_daemon_that_refuses_to_start_late_says_only_why() -> None:
    """It serves calls by then, and gRPC must not outlive the event loop."""
    with socket.create_server(("127.0.0.1", 0)) as other, tempfile.TemporaryDirectory(prefix="kinetod-") as root:
        refused = Daemon(Path(root), environ={"KINETOD_METRICS_LISTEN": f"127.0.0.1:{other.getsockname()[1]}"})
        with pytest.raises(DaemonFailed, match="exit status 1"):
            refused.start()
        said = refused.log()
    assert said.splitlines()[-1].startswith("kinetod: ")
    assert "metrics" in said.splitlines()[-1] and "Traceback" not in said


def with_verdict(events: Iterator[pb.CaptureEvent], pid: int) -> pb.Target:
    """A target once it has its verdict, which may be so from the first snapshot on."""
    targets = (target for event in events for target in (*event.snapshot.targets, event.target))
    return next(target for target in targets if target.pid == pid and target.verdict)


@pytest.mark.slow
def test_a_daemon_killed_after_the_verdict_ends_the_capture_and_tidies_up(mortal: Daemon) -> None:
    with RemoteAgent(mortal.agent_socket) as first, RemoteAgent(mortal.agent_socket) as second:
        first.do("hello")
        second.do("hello")
        capture_id = create(mortal, first.pid, second.pid)
        first.do("capture 10")
        events = mortal.stub().WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(20))
        with_verdict(events, first.pid)
        raw = mortal.state_dir / "captures" / capture_id / "targets"
        until(lambda: not list(raw.glob(f"{first.pid}-*/raw")), "the verdict is stored and the raw records are gone")
        mortal.kill()
        (folder,) = raw.glob(f"{first.pid}-*")
        (folder / "raw").mkdir()
        mortal.start()
        capture = watch_to_end(mortal.stub(), capture_id)
    ends = {target.pid: (target.verdict, target.reason_code) for target in capture.targets}
    assert ends == {
        first.pid: (pb.VERDICT_DONE, ""),
        second.pid: (pb.VERDICT_FAILED, "DAEMON_RESTARTED"),
    }
    assert not (folder / "raw").exists()


@pytest.mark.slow
def test_a_daemon_killed_after_a_failure_leaves_nothing_of_it(mortal: Daemon) -> None:
    with RemoteAgent(mortal.agent_socket) as first, RemoteAgent(mortal.agent_socket) as second:
        first.do("hello")
        second.do("hello")
        capture_id = create(mortal, first.pid, second.pid)
        first.do("await_start", "announce", "state WARMUP")
        first.kill()
        events = mortal.stub().WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(20))
        failed = with_verdict(events, first.pid)
        folder = mortal.state_dir / "captures" / capture_id / "targets" / f"{failed.pid}-{failed.start_time_ns}"
        until(lambda: not folder.exists(), "the verdict is stored and the folder is gone")
        mortal.kill()
        (folder / "raw").mkdir(parents=True)
        mortal.start()
        watch_to_end(mortal.stub(), capture_id)
    assert not folder.exists()
