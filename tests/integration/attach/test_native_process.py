"""A compiled CUDA program that nobody prepared: `kinetoctl trace --pid` brings the collector in, traces, and leaves."""

import gzip
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.sources.cupti import cuda_devices
from kinetod.attach.attach_types import Deadline
from kinetod.attach.channel.remote_collector import RemoteCollector
from kinetod.attach.inspect.process_inspection import Access, read_process
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods import collector_thread
from support.machine import native
from support.service.cli import kinetoctl, run_process, wait_for_records
from support.service.daemon import Daemon, running_daemon
from support.targets.fake_program import FakeProgram, sockets
from support.waiting import scaled, until

pytestmark = pytest.mark.slow
WINDOW = "2s"  # a starved program launches nothing in less


@pytest.fixture
def program() -> Iterator[FakeProgram]:
    with FakeProgram() as started:
        if read_process(started.pid).access is Access.REFUSED:
            pytest.skip("this user may not trace its own processes (ptrace_scope)")
        yield started


def trace(daemon: Daemon, program: FakeProgram, folder: Path, *arguments: str) -> Any:
    """The only target of `kinetoctl trace`."""
    command = ["trace", "--pid", str(program.pid), "-o", "json", *arguments]
    result = run_process(command, daemon.client_environ(), folder)
    assert result.stdout, result.stderr
    (target,) = result.json()["targets"]
    return target


def events(folder: Path) -> list[dict[str, Any]]:
    """All events of the only trace file in a folder."""
    (path,) = folder.glob("*.json.gz")
    with gzip.open(path, "rt") as stream:
        loaded: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return loaded


def test_its_kernels_and_calls_are_traced(daemon: Daemon, program: FakeProgram, tmp_path: Path) -> None:
    target = trace(daemon, program, tmp_path, "--duration", WINDOW)
    assert (target["verdict"], target["warnings"]) == ("VERDICT_DONE", [])
    found = Counter(event.get("cat") for event in events(tmp_path) if event["ph"] == "X")
    assert found["kernel"] > 20
    assert found["cuda_runtime"] > 20
    assert {kernel["name"] for kernel in target["summary"]["top_kernels"]} == {"void infer<float>(float const*)"}
    assert "finalized 1 misused 0" in program.ask("counts")


def test_several_traces_use_one_agent(daemon: Daemon, program: FakeProgram, tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert trace(daemon, program, folder, "--duration", "50ms")["verdict"] == "VERDICT_DONE"
    assert "finalized 3 misused 0" in program.ask("counts")
    assert program.ask("threads").split().count("kineto-agent") == 1


def test_the_agent_leaves_and_can_be_brought_in_again(daemon: Daemon, program: FakeProgram, tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        target = trace(daemon, program, folder, "--duration", "50ms", "--keep-agent", "0s")
        assert target["verdict"] == "VERDICT_DONE"
        until(lambda: not program.serves(), "the collector's thread has left")
        assert sockets(program.pid) == []
    maps = Path(f"/proc/{program.pid}/maps").read_text()
    libraries = {line.split()[4] for line in maps.splitlines() if "memfd:kineto-collector" in line}
    assert len(libraries) == 1


def test_a_killed_program_leaves_its_kernels(daemon: Daemon, program: FakeProgram, tmp_path: Path) -> None:
    command = kinetoctl("trace", "--pid", str(program.pid), "--duration", "60s", "-o", "json")
    with subprocess.Popen(
        command, env=daemon.client_environ(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tracer:
        wait_for_records(daemon, program.pid)
        os.kill(program.pid, signal.SIGKILL)
        out, err = tracer.communicate(timeout=scaled(60))
    assert out, err + daemon.log()
    (target,) = json.loads(out)["targets"]
    assert (tracer.returncode, target["verdict"], target["reason_code"]) == (4, "VERDICT_PARTIAL", "TARGET_EXITED")
    assert target["summary"]["activities"]["kernel"] > 0


def test_a_killed_daemon_leaves_the_program_as_it_was(program: FakeProgram, tmp_path: Path) -> None:
    with running_daemon() as own:
        command = kinetoctl("trace", "--pid", str(program.pid), "--duration", "60s", "-o", "json")
        with subprocess.Popen(
            command, env=own.client_environ(), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as tracer:
            wait_for_records(own, program.pid)
            os.kill(own.pid, signal.SIGKILL)
            tracer.kill()
    until(lambda: not program.serves(), "the collector's thread has left")
    assert sockets(program.pid) == []
    assert "finalized 1 misused 0" in program.ask("counts")


@pytest.mark.parametrize(("busy", "parked"), [(1, 0), (4, 0), (4, 1)])
def test_a_program_that_lives_in_malloc_is_never_harmed(busy: int, parked: int) -> None:
    storm = native.build("malloc_storm", [native.FAKES / "malloc_storm.c"], ["-O2"])
    with subprocess.Popen([str(storm), str(busy), str(parked)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if read_process(process.pid).access is Access.REFUSED:
            process.kill()
            pytest.skip("this user may not trace its own processes (ptrace_scope)")
        tasks = Path(f"/proc/{process.pid}/task")
        for _ in range(20):
            _stop, channel = collector_thread.bring_in(TargetImage(process.pid), time.time_ns(), Deadline(scaled(20)))
            remote = RemoteCollector(channel)
            assert cuda_devices.describe(remote.device) == {"devices": []}
            remote.leave()
            until(lambda: len(list(tasks.iterdir())) == busy + parked, "the collector's thread has left")
        assert process.poll() is None
        process.kill()


@pytest.fixture
def launching_program() -> Iterator[FakeProgram]:
    with FakeProgram(device_graphs=True) as started:
        if read_process(started.pid).access is Access.REFUSED:
            pytest.skip("this user may not trace its own processes (ptrace_scope)")
        yield started


@pytest.mark.parametrize("activities", [(), ("--activities", "cuda_runtime")])
def test_of_a_program_that_launches_graphs_from_the_device_nothing_of_cuda_is_traced(
    daemon: Daemon, launching_program: FakeProgram, tmp_path: Path, activities: tuple[str, ...]
) -> None:
    target = trace(daemon, launching_program, tmp_path, "--duration", "50ms", *activities)
    assert (target["verdict"], target["reason_code"]) == ("VERDICT_FAILED", "CUDA_DEVICE_GRAPHS")
    assert str(Path(f"/proc/{launching_program.pid}/exe").readlink()) in target["reason"]
    assert "finalized 0 misused 0" in launching_program.ask("counts")


def test_doctor_says_that_a_program_launches_graphs_from_the_device(
    daemon: Daemon, launching_program: FakeProgram
) -> None:
    result = run_process(["doctor", str(launching_program.pid)], daemon.client_environ())
    assert "launches graphs" in result.stdout


def test_a_first_call_of_cupti_that_stands_is_told_as_one(daemon: Daemon, program: FakeProgram, tmp_path: Path) -> None:
    program.ask("set subscribe_delay_ms 3600000")
    target = trace(daemon, program, tmp_path, "--duration", "50ms")
    assert (target["verdict"], target["reason_code"]) == ("VERDICT_FAILED", "GPU_DOES_NOT_DRAIN")
    assert target["reason"].startswith("cupti: CUPTI's first call has not returned")
    inside = f"process {program.pid} has been inside cuptiSubscribe for "

    def is_told() -> bool:
        done = run_process(["doctor", str(program.pid)], daemon.client_environ())
        return inside in " ".join(done.stdout.split())

    until(is_told, "it has lasted 3 s")
    program.ask("set subscribe_delay_ms 0")
    until(lambda: not is_told(), "it has returned")
