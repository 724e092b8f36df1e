"""An accelerator outside of torch, known only through torch's PrivateUse1 registry, traced live in a plain process."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.accelerators import private_device
from support.accelerators.private_device import COPY, FILL, KERNEL, NAME
from support.machine.kernel import allowed_to_trace
from support.service.cli import run_process
from support.service.daemon import Daemon, watch_to_end, watch_until_it_collects
from support.targets.programs import Program, hear, tell
from support.waiting import scaled, scaled_option

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)"),
    pytest.mark.skipif(private_device.compiler() is None, reason="no C++ compiler"),
]
PROGRAM = Path(private_device.__file__)
OPERATOR = "acme::gemm"
CLOCKS_DIFFER_US = 400  # less than the program sleeps between two operators


@pytest.fixture(scope="module")
def process() -> Iterator[Program]:
    """The program, prepared by nobody."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    command = [sys.executable, str(PROGRAM), str(private_device.library())]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        assert started.poll() is None
        started.kill()
        assert started.stderr is not None
        assert [line for line in started.stderr if not line.startswith("USDT")] == []  # Kineto's own sessions write it


def traced(daemon: Daemon, process: Program, folder: Path, *options: str) -> dict[str, Any]:
    """The only target of a trace, and its file under "trace"."""
    arguments = ["trace", "--pid", str(process.pid), "--output-dir", str(folder), "-o", "json", *options]
    result = run_process(arguments, daemon.client_environ())
    target: dict[str, Any]
    (target,) = result.json()["targets"]
    files = [Path(file["path"]) for file in target["files"]]
    target["trace"] = json.loads(gzip.decompress(files[0].read_bytes())) if files else {}
    return target


def asked(process: Program, command: str) -> Any:
    tell(process, command)
    return json.loads(hear(process))


def rows(target: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [row for row in target["trace"]["traceEvents"] if row.get("cat") == category and row["ph"] == "X"]


def test_its_work_is_in_the_trace_with_the_names_and_times_of_the_device(
    daemon: Daemon, process: Program, tmp_path: Path
) -> None:
    target = traced(daemon, process, tmp_path, "--duration", scaled_option(0.5))
    assert target["verdict"] == "VERDICT_DONE", target["reason"]
    log = {row[1]: row for row in asked(process, "log")}
    base = target["trace"]["baseTimeNanoseconds"]
    for category, name in (("kernel", KERNEL), ("gpu_memcpy", COPY), ("gpu_memset", FILL)):
        found = rows(target, category)
        assert len(found) > 3
        assert {row["name"] for row in found} == {name}
        for row in found:
            _name, correlation, _thread, start, end, _launch = log[row["args"]["correlation"]]
            assert base + round(row["ts"] * 1000) == start
            assert round(row["dur"] * 1000) == end - start
            assert (row["args"]["device"], row["args"]["stream"], row["args"]["correlation"]) == (0, 7, correlation)
    numbers = sorted(row["args"]["correlation"] for row in rows(target, "kernel"))
    assert numbers == [number for number in range(numbers[0], numbers[-1] + 1) if log[number][0] == KERNEL]


def operator_around(call: dict[str, Any], operators: list[dict[str, Any]]) -> int | None:
    """The number of the acme::gemm that made the call; None if the recording has none: it began before.

    The device's times are of the system's clock, torch's of the processor's counter, which torch converts: on a busy
    machine they differ by more than an operator lasts.
    """
    begin, end = call["ts"] + CLOCKS_DIFFER_US, call["ts"] + call["dur"] - CLOCKS_DIFFER_US
    around = (row for row in operators if row["ts"] <= begin and end <= row["ts"] + row["dur"])
    number: int | None = next((row["args"]["External id"] for row in around if row["name"] == OPERATOR), None)
    return number


def test_its_kernels_belong_to_the_operators_that_launched_them(
    daemon: Daemon, process: Program, tmp_path: Path
) -> None:
    target = traced(daemon, process, tmp_path, "--duration", scaled_option(0.3))
    operators, kernels = rows(target, "cpu_op"), rows(target, "kernel")
    calls = {row["args"]["correlation"]: row for row in rows(target, "privateuse1_runtime")}
    assert {call["name"] for call in calls.values()} == {"acmeLaunch"}
    expected = [operator_around(calls[kernel["args"]["correlation"]], operators) for kernel in kernels]
    assert [kernel["args"].get("External id") for kernel in kernels] == expected
    assert None not in expected[1:]  # the device may still execute what was launched before the recording
    assert len(expected) > 1
    assert kernels[0]["args"]["grid"] == [4, 2, 1]
    assert [device["name"] for device in target["trace"]["deviceProperties"]] == ["Acme A1"]
    (counts,) = [each for each in target["counts"] if each["source"] == "torch_ops"]
    assert counts["way"].startswith(f"torch.profiler: activities of {NAME} need it")


def test_operators_alone_do_not_touch_its_profiler(daemon: Daemon, process: Program, tmp_path: Path) -> None:
    target = traced(daemon, process, tmp_path, "--duration", "200ms", "--activities", "cpu_op")
    assert target["verdict"] == "VERDICT_DONE", target["reason"]
    assert rows(target, "kernel") == []
    (counts,) = [each for each in target["counts"] if each["source"] == "torch_ops"]
    assert counts["way"].startswith("observer")


def profiled(process: Program, path: Path) -> None:
    """The program's own profiler sees all of the device's work."""
    assert asked(process, f"profile {path}") == []
    found = asked(process, "end")
    assert found["traced"] == found["launched"] >= 3


def test_the_programs_own_profiler_comes_first(daemon: Daemon, process: Program, tmp_path: Path) -> None:
    assert asked(process, f"profile {tmp_path / 'own.json'}") == []
    during = traced(daemon, process, tmp_path / "one", "--duration", "200ms", "--activities", "kernel")
    assert (during["verdict"], during["reason_code"]) == ("VERDICT_FAILED", "USER_PROFILER_ACTIVE")
    found = asked(process, "end")
    assert found["traced"] == found["launched"] >= 3
    after = traced(daemon, process, tmp_path / "two", "--duration", scaled_option(0.3))
    assert after["verdict"] == "VERDICT_DONE", after["reason"]
    assert rows(after, "kernel")
    profiled(process, tmp_path / "after.json")


def test_a_capture_gives_way_to_the_programs_own_profiler(daemon: Daemon, process: Program, tmp_path: Path) -> None:
    stub = daemon.stub()
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[process.pid]), duration_ns=60 * 10**9, activity_types=["kernel"])
    capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(30)).id
    watch_until_it_collects(stub, capture_id)
    asked(process, "log")
    profiled(process, tmp_path / "own.json")
    (target,) = watch_to_end(stub, capture_id).targets
    assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "USER_PROFILER_STARTED")
    assert target.summary.activities["kernel"] > 0
