"""AMD GPUs end to end without a GPU: real CLI, daemon, agent and collector, fake ROCm."""

from collections import Counter
from pathlib import Path

import pytest
from kinetoctl.commands.run import ROCM_VARIABLE, rocm_tools
from support.rocm.program import rocm_program
from support.service.cli import kinetoctl
from support.service.daemon import Daemon
from support.service.tracing import trace_around, trace_events

LATE = "rocprofiler covers"  # it begins after the window: a fact about a machine under load
EVERYTHING = ("--activities", "kernel,gpu_memcpy,cuda_runtime")


def test_a_program_that_nobody_prepared_is_traced_live(daemon: Daemon, tmp_path: Path) -> None:
    with rocm_program(tmp_path, daemon.client_environ(), version=10305) as program:
        target, told = trace_around(
            daemon, program.pid, tmp_path / "out", lambda: program.order("launch 20000"), *EVERYTHING
        )
        assert program.order("status")["variables"] == []
        assert program.end() == 0
    assert told is not None
    rows = trace_events(tmp_path / "out")
    kernels = [row for row in rows if row.get("cat") == "kernel"]
    assert Counter(row["name"] for row in kernels) == told["kernels"]
    assert Counter(row.get("cat") for row in rows)["gpu_memcpy"] == told["copies"]
    assert {row["args"]["stream"] for row in kernels} == {1, 2}
    launches = {row["args"]["correlation"] for row in rows if row.get("cat") == "cuda_runtime"}
    assert {row["args"]["correlation"] for row in kernels} <= launches
    assert [text for text in target["warnings"] if not text.startswith(LATE)] == []
    top = {kernel["name"]: kernel["count"] for kernel in target["summary"]["top_kernels"]}
    assert top == told["kernels"]


def test_times_lie_where_the_program_says(daemon: Daemon, tmp_path: Path) -> None:
    with rocm_program(tmp_path, daemon.client_environ(), version=10401) as program:
        target, told = trace_around(
            daemon, program.pid, tmp_path / "out", lambda: program.order("launch 2000"), *EVERYTHING
        )
    assert told is not None
    base = int(target["summary"]["window_start_ns"])
    rows = [row for row in trace_events(tmp_path / "out") if row.get("cat") in ("kernel", "gpu_memcpy", "cuda_runtime")]
    assert rows
    earliest = min(row["ts"] for row in rows)
    latest = max(row["ts"] + row["dur"] for row in rows)
    assert (latest - earliest) * 1000 <= told["ended"] - told["began"] + 100_000
    assert base <= told["began"]


@pytest.mark.parametrize(
    ("version", "code"),
    [(10200, "ROCPROFILER_TOO_LATE"), (10302, "ROCPROFILER_HANGS"), (600, "ROCPROFILER_UNKNOWN_VERSION")],
)
def test_what_cannot_be_recorded_is_refused_and_the_program_goes_on(
    version: int, code: str, daemon: Daemon, tmp_path: Path
) -> None:
    with rocm_program(tmp_path, daemon.client_environ(), version=version) as program:
        target, told = trace_around(daemon, program.pid, tmp_path / "out", lambda: None, *EVERYTHING)
        assert (target["verdict"], target["reason_code"], told) == ("VERDICT_FAILED", code, None)
        assert program.order("launch 100")["kernels"] == {"first(int)": 50, "second(int)": 50}
        assert program.end() == 0


def test_started_by_kinetoctl_run_an_old_version_records_too(daemon: Daemon, tmp_path: Path) -> None:
    environ = daemon.client_environ()
    environ[ROCM_VARIABLE] = rocm_tools({})  # as `kinetoctl run` sets it where there is an AMD GPU
    prefix = kinetoctl("--quiet", "run", "--")
    with rocm_program(tmp_path, environ, prefix=prefix, version=10200) as program:
        target, told = trace_around(
            daemon, program.pid, tmp_path / "out", lambda: program.order("launch 2000"), *EVERYTHING
        )
        assert program.end() == 0
    assert told is not None
    assert [text for text in target["warnings"] if not text.startswith(LATE)] == []
    kernels = [row["name"] for row in trace_events(tmp_path / "out") if row.get("cat") == "kernel"]
    assert Counter(kernels) == told["kernels"]
