"""Hardware counters of AMD's GPUs in a trace: real daemon, agent and processes over ROCm's fakes and a played /sys."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import open_trace
from kineto_trace.model.trace import Trace
from kineto_trace.spool.counter_samples import SUFFIX, last_end_ns
from kinetod.counters.power.interface import POWER_SUFFIX
from support.counters.gpu_metrics_tables import PlayedAmdgpu
from support.rocm import fakes as rocm
from support.rocm.program import rocm_program
from support.service.daemon import running_daemon
from support.service.tracing import trace_around
from support.waiting import until

ACTIVITIES = ("--activities", "kernel,cuda_runtime")


def means_of(trace: Trace, device: int) -> dict[str, float]:
    """By label."""
    rows = trace.table("counter")
    its = rows["device"] == device
    return {
        trace.strings[number]: float(np.nanmean(rows["value"][its & (rows["name"] == number)]))
        for number in np.unique(rows["name"][its]).tolist()
    }


@contextmanager
def traced(tmp_path: Path, memory: dict[int, int]) -> Iterator[tuple[dict[str, Any], Trace]]:
    """The target and the trace of a program on these GPUs of the kernel's, each with so many bytes."""
    played = PlayedAmdgpu(tmp_path / "host", (1, 8), (1, 8))
    folder = tmp_path / "rocm"
    rocm.installed(folder)
    with (
        played.alive(),
        running_daemon(environ={"KINETOD_COUNTERS_SOCKET": "", **played.environ()}) as daemon,
        rocm_program(folder, daemon.client_environ(), version=10305) as program,
    ):
        played.host.kfd_process(program.pid, memory, {})

        def are_sampled(since_ns: int) -> bool:
            files = (daemon.state_dir / "captures").glob(f"*/targets/{program.pid}-*/raw/*{SUFFIX}")
            sampled = [path for path in files if not path.name.endswith(POWER_SUFFIX)]
            return len(sampled) == len(memory) and all(
                path.stat().st_size and last_end_ns(path) > since_ns for path in sampled
            )

        def launched() -> bool:
            begin_ns = time.time_ns()
            until(lambda: are_sampled(begin_ns), "each GPU has samples of the window", state=daemon.log)
            for _ in range(20):
                program.order("launch 100")
            return True

        target, told = trace_around(daemon, program.pid, tmp_path / "out", launched, *ACTIVITIES, "--counters")
        assert told
        (path,) = (daemon.state_dir / "captures").glob(f"*/targets/{program.pid}-*")
        yield target, open_trace(path)  # whose columns are read from the daemon's folder


def test_a_process_on_two_gpus_has_the_counters_of_each_by_its_own_numbers(tmp_path: Path) -> None:
    with traced(tmp_path, {1: 1 << 20, 2: 1 << 20}) as (target, trace):
        assert not [text for text in target["warnings"] if "are left out" in text]
        busy = [means_of(trace, device)["GPU busy"] for device in (0, 1)]
        assert busy == [11.0, 10.0]  # rocprofiler has the host's GPU 1 first


def test_a_trace_has_the_counters_of_the_gpu_that_its_process_is_on(tmp_path: Path) -> None:
    with traced(tmp_path, {2: 1 << 20}) as (target, trace):
        assert target["verdict"] in ("VERDICT_DONE", "VERDICT_PARTIAL"), target
        assert "counter" in trace.tables, target["warnings"]
        means = means_of(trace, 0)
        assert (means["GPU busy"], means["DRAM"]) == (11.0, 21.0)  # of the host's GPU 1
        assert means["Power, mean"] == pytest.approx(100, rel=0.02)
