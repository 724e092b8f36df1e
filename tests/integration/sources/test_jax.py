"""A JAX training loop on the CPU that nobody prepared, traced from outside, and its own profiler meanwhile."""

import gzip
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from support.losses import without_losses
from support.service.daemon import Daemon, running_daemon, watch_to_end, watch_until_it_collects
from support.service.plugin_packages import beside_kinetod, install_example
from support.targets import programs
from support.waiting import scaled
from support.xla.profiler_stress import LOOP, OWN_STEPS, TYPES, stress

pytestmark = pytest.mark.jax
MS = 10**6


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as found:
        yield found


@pytest.fixture
def loop(daemon: Daemon) -> Iterator[programs.Program]:
    with programs.program([sys.executable, str(LOOP)], daemon) as process:
        yield process


def begin(stub: ProfilerStub, pid: int, duration_ms: int, *types: str) -> str:
    """A capture that collects by now."""
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ms * MS, activity_types=types)
    capture_id: str = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(60)).id
    watch_until_it_collects(stub, capture_id)
    return capture_id


def trace_of(stub: ProfilerStub, capture_id: str) -> dict[str, Any]:
    chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture_id), timeout=scaled(30))
    found: dict[str, Any] = json.loads(gzip.decompress(b"".join(chunk.data for chunk in chunks)))
    return found


def ask(process: programs.Program, command: str) -> dict[str, Any]:
    programs.tell(process, command)
    found: dict[str, Any] = json.loads(programs.hear(process))
    return found


def test_hlo_operations_and_steps_are_in_the_trace_without_asking_for_them(
    daemon: Daemon, loop: programs.Program
) -> None:
    capture_id = begin(daemon.stub(), loop.pid, round(scaled(200)))
    (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
    assert target.verdict == pb.VERDICT_DONE, target.reason
    assert target.attach.method in ("pending-call", "native-thread")
    rows = [row for row in trace_of(daemon.stub(), capture_id)["traceEvents"] if row.get("ph") == "X"]
    kinds = Counter(row["cat"] for row in rows)
    modules = Counter(row.get("args", {}).get("hlo_module") for row in rows if row["cat"] == "cpu_op")
    steps = [row for row in rows if row["cat"] == "user_annotation" and row["name"].startswith("ProfilerStep#")]
    assert kinds["python_function"] > 0
    assert modules["jit_train_step"] > 10 * (len(steps) - 2) > 0
    assert target.summary.iterations == len([row for row in steps if "complete" not in row.get("args", {})])
    main = {row["tid"] for row in rows if row["name"] == "PjitFunction(train_step)"}
    assert main  # its own row: XLA does not say which of several Python threads of a name it is


def test_iterations_are_counted_in_one_way_whatever_is_recorded(daemon: Daemon, loop: programs.Program) -> None:
    numbers = []
    for types in ((), ("python_function",), ("user_annotation",)):
        capture_id = begin(daemon.stub(), loop.pid, round(scaled(200)), *types)
        (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
        assert (target.verdict, without_losses(target.warnings)) == (pb.VERDICT_DONE, [])
        rows = [row for row in trace_of(daemon.stub(), capture_id)["traceEvents"] if row.get("ph") == "X"]
        steps = [row["name"] for row in rows if row["name"].startswith("ProfilerStep#")]
        numbers += [int(name.partition("#")[2]) for name in steps]
        marked = [row["args"]["step_num"] for row in rows if row["name"] == "train"]
        assert bool(marked) == (types != ("python_function",))
        assert steps and numbers == sorted(set(numbers))
        assert not marked or marked[0] > numbers[0]  # the agent came later than the first step


def test_kernels_that_a_cpu_does_not_have_fail_for_that_reason_although_a_plug_in_declares_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "site").mkdir()
    install_example(tmp_path / "site")
    with (
        running_daemon(environ={**beside_kinetod(tmp_path / "site"), "KINETOD_PLUGINS_SOURCES": "pebble"}) as daemon,
        programs.program([sys.executable, str(LOOP)], daemon) as process,
    ):
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[process.pid]), duration_ns=200 * MS, activity_types=["kernel"])
        capture_id = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(60)).id
        (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
        assert (target.reason_code, target.reason) == (
            "NOTHING_TO_RECORD",
            "this process cannot record kernel: JAX uses only the CPU here, which has no kernels",
        )


def test_a_trace_of_its_own_during_a_capture_is_whole_and_the_capture_says_why_it_ended(
    daemon: Daemon, loop: programs.Program
) -> None:
    before = ask(loop, "profile")
    capture_id = begin(daemon.stub(), loop.pid, 60_000, *TYPES)
    during = ask(loop, "profile")
    (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
    after = ask(loop, "profile")
    assert [own["train"] for own in (before, during, after)] == [OWN_STEPS] * 3
    assert min(own["operations"] for own in (before, during, after)) > 0
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "USER_PROFILER_STARTED")
    assert target.reason.startswith("the program's own jax.profiler started during the capture")
    assert target.summary.window_end_ns <= during["open_ns"]
    assert target.summary.activities["cpu_op"] > 0


def test_a_server_that_starts_during_a_capture_ends_it_and_keeps_later_ones_from_beginning(
    daemon: Daemon, loop: programs.Program
) -> None:
    capture_id = begin(daemon.stub(), loop.pid, 60_000, *TYPES)
    ask(loop, "server")
    (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "USER_PROFILER_STARTED")
    assert target.reason.startswith("the program's own jax.profiler's server started during the capture")
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[loop.pid]), duration_ns=50 * MS, activity_types=TYPES)
    capture_id = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(60)).id
    (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, "NOTHING_TO_RECORD")
    assert "the program has a profiler server (jax.profiler.start_server)" in target.reason


def test_a_fork_during_a_capture_disturbs_neither(daemon: Daemon, loop: programs.Program) -> None:
    capture_id = begin(daemon.stub(), loop.pid, 300, *TYPES)
    assert ask(loop, "fork") == {"status": 0}
    (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
    assert target.verdict == pb.VERDICT_DONE, target.reason
    assert ask(loop, "profile")["train"] == OWN_STEPS


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_program_that_ends_during_a_capture_ends_as_it_would(
    daemon: Daemon, loop: programs.Program, how: str
) -> None:
    capture_id = begin(daemon.stub(), loop.pid, 60_000, *TYPES)
    if how == "exit":
        programs.tell(loop, "exit")
    else:
        os.kill(loop.pid, signal.SIGKILL)
    status = loop.wait(scaled(60))
    (target,) = watch_to_end(daemon.stub(), capture_id, 120).targets
    assert status == (0 if how == "exit" else -signal.SIGKILL)
    assert target.verdict in (pb.VERDICT_PARTIAL, pb.VERDICT_FAILED)
    if how == "exit":
        assert target.summary.activities["cpu_op"] > 0, target.reason


@pytest.mark.slow
def test_own_traces_are_whole_and_every_capture_says_what_became_of_it(daemon: Daemon) -> None:
    report = stress(daemon, 20)
    assert report.problems == []
    assert report.own_traces > 20
