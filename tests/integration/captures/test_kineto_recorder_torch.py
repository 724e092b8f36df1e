"""Captures by the libkineto of an unmodified torch, which was started with KINETO_USE_DAEMON."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine import native
from support.peers.on_demand_kineto import polls_in
from support.service.daemon import Daemon, error_of, running_daemon, watch_to_end
from support.waiting import scaled, until

pytestmark = pytest.mark.torch
SECOND_NS = 10**9
SCRIPT = Path(__file__).parents[2] / "support/targets/polling_training.py"
LATE_RECORDING = Path(__file__).parents[2] / "fakes/late_recording.c"
PAUSE_S = 0.2


@dataclass(frozen=True)
class Host:
    """A daemon, and where libkineto finds it."""

    daemon: Daemon
    folder: Path

    def environ(self) -> dict[str, str]:
        """Of programs as their users start them: nothing of kinetod is in it."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHONPATH"))}
        return {**own, "KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}

    @contextmanager
    def program(self, *arguments: str, **environ: str) -> Iterator["Program"]:
        """A running one, of which nothing is known yet. environ: beside what every program has."""
        command = [sys.executable, "-P", str(SCRIPT), *arguments]
        with subprocess.Popen(
            command, env={**self.environ(), **environ}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield Program(self, process)
            finally:
                process.kill()

    def polls(self, pid: int) -> bool:
        """Whether the daemon knows that its libkineto polls."""
        request = pb.ListProcessesRequest(selector=pb.Selector(pids=[pid]), include_without_agent=True)
        found = self.daemon.stub().ListProcesses(request, timeout=20).processes
        return any(process.HasField("kineto") for process in found)


@dataclass(frozen=True)
class Program:
    """One training."""

    host: Host
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def until_it_trains(self) -> "Program":
        """Waits until it trains and its libkineto polls."""
        assert self.process.stdout is not None
        assert [self.process.stdout.readline() for _ in range(2)] == [b"importing\n", b"training\n"]
        until(lambda: self.host.polls(self.pid), "its libkineto polls", 60, pause_s=PAUSE_S)
        return self

    def create(self, **fields: Any) -> pb.Capture:
        """A capture by its libkineto."""
        if "iterations" not in fields:
            fields.setdefault("duration_ns", SECOND_NS)  # a starved program computes nothing in less
        spec = {"selector": pb.Selector(pids=[self.pid]), "recorder": pb.RECORDER_KINETO, "formats": ["chrome-json"]}
        request = pb.CreateCaptureRequest(spec=pb.CaptureSpec(**{**spec, **fields}))
        capture: pb.Capture = self.host.daemon.stub().CreateCapture(request, timeout=20)
        return capture

    def ended(self, capture: pb.Capture) -> pb.Target:
        """Its target once it has its verdict."""
        (target,) = watch_to_end(self.host.daemon.stub(), capture.id, 120).targets
        return target

    def traced(self, **fields: Any) -> tuple[pb.Target, dict[str, Any]]:
        """A capture that has to succeed, and the file that libkineto wrote."""
        capture = self.create(**fields)
        target = self.ended(capture)
        assert (target.verdict, target.reason) == (pb.VERDICT_DONE, "")
        request = pb.FetchTraceRequest(capture_id=capture.id, pid=self.pid, format="chrome-json")
        chunks = self.host.daemon.stub().FetchTrace(request, timeout=60)
        return target, json.loads(b"".join(chunk.data for chunk in chunks))


def rows(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [row for row in trace["traceEvents"] if row.get("cat") == category]


def steps(trace: dict[str, Any]) -> int:
    return sum("Optimizer.step" in row["name"] for row in rows(trace, "user_annotation"))


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="dynolog-") as name:
        Path(name).chmod(0o1777)
        with running_daemon(environ=polls_in(name)) as started:
            yield Host(started, Path(name))


@pytest.fixture(scope="module")
def stepping(host: Host) -> Iterator[Program]:
    with host.program("steps") as program:
        yield program.until_it_trains()


def test_a_duration_and_then_iterations_with_shapes_and_every_call(stepping: Program) -> None:
    target, trace = stepping.traced()
    assert (target.recorder, target.summary.activities["cpu_op"]) == (pb.RECORDER_KINETO, len(rows(trace, "cpu_op")))
    assert not any("Input Dims" in row["args"] for row in rows(trace, "cpu_op"))
    options = pb.Options(record_shapes=True, with_stack=True, stack_trace=True)
    target, trace = stepping.traced(iterations=pb.IterationWindow(count=5), options=options)
    assert steps(trace) == 5
    assert any("Input Dims" in row["args"] for row in rows(trace, "cpu_op"))
    assert len(rows(trace, "python_function")) == target.summary.activities["python_function"] > 0
    assert not list(Path("/tmp").glob(f"kinetod-*_{stepping.pid}.json*"))


def test_a_second_capture_meanwhile_is_busy(stepping: Program) -> None:
    capture = stepping.create()
    _, reason, text = error_of(stepping.create)
    assert (reason, capture.id in text) == ("BUSY", True)
    assert stepping.ended(capture).verdict == pb.VERDICT_DONE


@pytest.mark.slow
def test_three_in_a_row_are_three_whole_traces(stepping: Program) -> None:
    found = [stepping.traced()[1] for _ in range(3)]
    assert len({trace["trace_id"] for trace in found}) == 3
    assert all(rows(trace, "cpu_op") for trace in found)


@pytest.mark.slow
def test_a_file_that_is_opened_long_before_it_records_is_awaited(host: Host) -> None:
    late = native.build("liblate_recording.so", [LATE_RECORDING], ["-shared", "-fPIC"])
    with host.program("steps", LD_PRELOAD=str(late), LATE_RECORDING_S="6") as program:  # a poll is within
        assert rows(program.until_it_trains().traced(duration_ns=9 * SECOND_NS)[1], "cpu_op")


@pytest.mark.slow
def test_a_request_whose_start_has_passed_before_libkineto_comes_to_it_is_made_again(host: Host) -> None:
    with host.program("steps") as program:
        capture = program.until_it_trains().create()
        until(lambda: _is_sent(host.daemon, capture), "it is sent", 60)
        os.kill(program.pid, signal.SIGSTOP)
        late_ns = time.time_ns() + 4 * SECOND_NS
        until(lambda: time.time_ns() > late_ns, "the start has passed", 60)
        os.kill(program.pid, signal.SIGCONT)
        assert program.ended(capture).verdict == pb.VERDICT_DONE


@pytest.mark.slow
def test_a_start_time_and_a_warm_up_are_kept(stepping: Program) -> None:
    begin_ns = time.time_ns() + 12 * SECOND_NS
    target, _ = stepping.traced(start_time_ns=begin_ns, warmup_ns=SECOND_NS)
    assert abs(target.summary.window_start_ns - begin_ns) < scaled(2) * SECOND_NS


@pytest.mark.slow
def test_the_trace_of_a_daemon_that_was_killed_is_fetched_by_the_next_one(stepping: Program) -> None:
    daemon = stepping.host.daemon
    capture = stepping.create(duration_ns=4 * SECOND_NS)
    until(lambda: _is_sent(daemon, capture), "it is sent", 60)
    daemon.kill()
    daemon.start()
    assert stepping.ended(capture).verdict == pb.VERDICT_DONE


def _is_sent(daemon: Daemon, capture: pb.Capture) -> bool:
    notes = (daemon.state_dir / "captures" / capture.id / "targets").glob("*/raw/kineto/request.json")
    return any(json.loads(path.read_bytes())["sent_ns"] for path in notes)


@pytest.mark.slow
def test_a_program_without_steps_refuses_iterations_and_takes_the_duration_instead(host: Host) -> None:
    with host.program("no-steps") as program:
        program.until_it_trains()
        refused = program.ended(program.create(iterations=pb.IterationWindow(count=5)))
        assert (refused.verdict, refused.reason_code) == (pb.VERDICT_FAILED, "NOT_TAKEN")
        target, trace = program.traced(iterations=pb.IterationWindow(count=5), or_duration_ns=SECOND_NS // 2)
        assert "libkineto does not report which" in target.warnings[0]
        assert steps(trace) == 0


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_records_has_no_trace(host: Host) -> None:
    with host.program("steps") as program:
        program.until_it_trains()
        capture = program.create(duration_ns=60 * SECOND_NS)
        states = host.daemon.stub().WatchCapture(pb.WatchCaptureRequest(id=capture.id), timeout=120)
        next(event for event in states if event.target.state == pb.TARGET_STATE_COLLECT)
        os.kill(program.pid, signal.SIGKILL)
        target = program.ended(capture)
        assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "TARGET_EXITED")
        until(lambda: not list(Path("/tmp").glob(f"kinetod-*_{program.pid}.json*")), "what it left is removed")


@pytest.mark.slow
def test_a_process_that_is_stopped_does_not_poll(host: Host) -> None:
    with host.program("steps") as program:
        program.until_it_trains()
        os.kill(program.pid, signal.SIGSTOP)
        target = program.ended(program.create())
        assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "NOT_POLLED")
        os.kill(program.pid, signal.SIGCONT)


STANDING_IMPORT = """
import sys
class Pause:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.functional":  # its C++ part is loaded by then, and polls
            print("importing", flush=True)
            sys.stdin.read()
sys.meta_path.insert(0, Pause())
import torch
"""


@pytest.mark.slow
def test_a_request_during_the_import_is_not_training_yet(host: Host) -> None:
    command = [sys.executable, "-P", "-c", STANDING_IMPORT]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=host.environ(), stdin=pipe, stdout=pipe, stderr=nothing) as process:
        program = Program(host, process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        until(lambda: host.polls(process.pid), "its libkineto polls", 60, pause_s=PAUSE_S)
        target = program.ended(program.create())
        assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "NOT_TRAINING_YET")
        process.kill()
