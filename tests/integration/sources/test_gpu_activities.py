"""GPU activities end to end without a GPU: real CLI, daemon, agent and collector, fake libcupti."""

import gzip
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.machine.native import FAKES, fake_cupti
from support.service.cli import kinetoctl, run_process, wait_for_agent, wait_for_records
from support.service.daemon import Daemon
from support.waiting import scaled, scaled_option

KERNELS_A_STEP = 30
# Of each kind. The program's calls are numbered without a gap, and a launch is a call of the driver within one of the
# runtime.
A_STEP = {
    "kernel": KERNELS_A_STEP,
    "gpu_memcpy": 1,
    "gpu_memset": 1,
    "cuda_sync": 1,
    "cuda_runtime": KERNELS_A_STEP + 3,
}
IDS_A_STEP = 2 * KERNELS_A_STEP + 3
EVERYTHING = "kernel,gpu_memcpy,gpu_memset,cuda_runtime,cuda_driver,cuda_sync,overhead"


@pytest.fixture
def app(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A "training" loop on a "GPU", with an agent, after its first step."""
    command = [sys.executable, str(FAKES / "fake_cuda_app.py"), "--kernels-per-step", str(KERNELS_A_STEP)]
    environ = {**daemon.client_environ(), "KINETO_CUPTI_LIBRARY": str(fake_cupti())}
    with subprocess.Popen(
        kinetoctl("--quiet", "run", "--", *command),
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["ready"]
            wait_for_agent(daemon, process.pid)
            yield process
        finally:
            process.kill()


def trace(daemon: Daemon, app: subprocess.Popen[str], folder: Path, *arguments: str) -> tuple[int, Any]:
    """Exit code and the only target of `kinetoctl trace`."""
    command = ["trace", "--pid", str(app.pid), "-o", "json", *arguments]
    result = run_process(command, daemon.client_environ(), folder)
    assert result.stdout, result.stderr
    (target,) = result.json()["targets"]
    return result.code, target


def events(folder: Path) -> list[dict[str, Any]]:
    """All events of the only trace file in a folder."""
    (path,) = folder.glob("*.json.gz")
    with gzip.open(path, "rt") as stream:
        loaded: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return loaded


def told(app: subprocess.Popen[str], command: str) -> dict[str, int]:
    """The app's answer to one line."""
    assert app.stdin is not None
    assert app.stdout is not None
    app.stdin.write(command + "\n")
    app.stdin.flush()
    answer: dict[str, int] = json.loads(app.stdout.readline())
    return answer


def test_iterations_hold_exactly_their_kernels(daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path) -> None:
    code, target = trace(daemon, app, tmp_path, "--iterations", "5", "--activities", EVERYTHING)
    assert (code, target["verdict"], target["warnings"]) == (0, "VERDICT_DONE", [])
    found = Counter(event.get("cat") for event in events(tmp_path) if event["ph"] == "X")
    assert found["kernel"] == 5 * KERNELS_A_STEP
    assert found["gpu_memcpy"] == found["gpu_memset"] == 5
    names = Counter(event["name"] for event in events(tmp_path) if event.get("cat") == "kernel")
    assert names["layer_norm"] == 5 * KERNELS_A_STEP // 3


def test_nothing_that_cupti_wrote_is_lost(daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path) -> None:
    _, target = trace(daemon, app, tmp_path, "--duration", "300ms", "--activities", EVERYTHING)
    written = told(app, "counts")
    summary = target["summary"]
    device = {kind: written[kind] - summary["activities"].get(kind, 0) for kind in A_STEP if kind != "cuda_runtime"}
    assert min(device.values()) >= 0
    assert sum(device.values()) <= summary["out_of_window"]
    assert (written["dropped"], written["misused"], written["finalized"]) == (0, 0, 1)


def test_no_step_in_the_window_lacks_a_record(daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path) -> None:
    trace(daemon, app, tmp_path, "--duration", "300ms", "--activities", EVERYTHING)
    rows = events(tmp_path)
    for kind, each in A_STEP.items():
        ids = sorted(row["args"]["correlation"] for row in rows if row.get("cat") == kind)
        assert len(ids) > each, kind
        apart = {later - earlier for earlier, later in zip(ids, ids[each:], strict=False)}
        assert apart == {IDS_A_STEP}, kind


@pytest.mark.slow
def test_every_kernel_has_its_launch_and_its_flow(daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path) -> None:
    trace(daemon, app, tmp_path, "--iterations", "3")
    rows = events(tmp_path)
    launches = {row["args"]["correlation"] for row in rows if row.get("cat") == "cuda_runtime"}
    kernels = [row["args"]["correlation"] for row in rows if row.get("cat") == "kernel"]
    ends = {row["id"] for row in rows if row["ph"] == "f" and row["cat"] == "ac2g"}
    assert len(kernels) == 3 * KERNELS_A_STEP
    assert set(kernels) <= launches
    assert set(kernels) <= ends


@pytest.mark.slow
def test_gpu_and_python_are_on_one_clock(daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path) -> None:
    _, target = trace(daemon, app, tmp_path, "--duration", scaled_option(0.5))
    rows = events(tmp_path)
    starts = {
        category: min(row["ts"] for row in rows if row.get("cat") == category)
        for category in ("kernel", "python_function")
    }
    assert abs(starts["kernel"] - starts["python_function"]) < scaled(500_000)
    assert 0 < target["summary"]["gpu_busy_fraction"] <= 1
    names = {kernel["name"].partition("(")[0] for kernel in target["summary"]["top_kernels"]}
    assert names == {"void gemm<float, 128, 64>", "softmax_warp_forward", "layer_norm"}


@pytest.mark.slow
def test_a_program_that_has_profiled_itself_before_is_traced_as_exactly(
    daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert told(app, "profile")["kernels"] == KERNELS_A_STEP  # from now on CUPTI's records bear another clock
    code, target = trace(daemon, app, tmp_path, "--iterations", "5", "--activities", "kernel,gpu_memcpy")
    assert (code, target["verdict"]) == (0, "VERDICT_DONE")
    found = Counter(event.get("cat") for event in events(tmp_path) if event["ph"] == "X")
    assert (found["kernel"], found["gpu_memcpy"]) == (5 * KERNELS_A_STEP, 5)
    lengths = [event["dur"] for event in events(tmp_path) if event.get("cat") == "kernel"]
    assert min(lengths) > 10  # µs; each takes 20
    assert max(lengths) < 30


@pytest.mark.slow
def test_a_killed_process_leaves_the_kernels_of_its_last_flush(
    daemon: Daemon, app: subprocess.Popen[str], tmp_path: Path
) -> None:
    command = kinetoctl("trace", "--pid", str(app.pid), "--duration", "60s", "-o", "json", "--activities", "kernel")
    with subprocess.Popen(
        command, env=daemon.client_environ(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tracer:
        wait_for_records(daemon, app.pid)
        app.send_signal(signal.SIGKILL)
        out, _ = tracer.communicate(timeout=scaled(60))
    (target,) = json.loads(out)["targets"]
    assert (tracer.returncode, target["verdict"]) == (4, "VERDICT_PARTIAL")
    assert target["reason_code"] == "TARGET_EXITED"
    assert target["summary"]["activities"]["kernel"] > 0
    assert any(event.get("cat") == "kernel" for event in events(tmp_path))
